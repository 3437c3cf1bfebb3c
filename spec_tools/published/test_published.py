"""The published measurements agree with each other, and the simulator's predictions with them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from statistics import median
from typing import Any

import pytest
import torch

from minifsdp_tools.simulate.machine import CARDS, Card, Network
from minifsdp_tools.simulate.recording import Recording, record
from minifsdp_tools.simulate.replay import replay
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import SHAPES
from minifsdp_tools.simulate.tape import Collective, Kernel, RecordEvent, Tape, WaitEvent
from spec_tools.published import predictions, table
from spec_tools.published.predictions import QUANTITIES, Constants
from spec_tools.published.setups import Case, case_of, parts_of

arithmetic = pytest.mark.proof("arithmetic")
ROWS = {row.row: row for row in table.load()}
MPTS = [row for row in ROWS.values() if (row.model or "").startswith("mpt")]
LINES = predictions.load()
CASES = {name: case for name, row in ROWS.items() if isinstance(case := case_of(row), Case)}
CHEAP = "mosaicml h100 mpt-1b 16"

# ---- the measurements -----------------------------------------------------------------------------------------------


@pytest.mark.spec("PUBLISHED-01")
def test_each_line_has_a_source_and_a_measurement_and_only_values_that_can_be_measured() -> None:
    rows = table.load()
    assert len(ROWS) == len(rows)
    assert Counter(row.source.split(" ")[0] for row in rows)["mosaicml/llm-foundry"] == len(MPTS) == 40
    for row in rows:
        values = dataclasses.asdict(row)
        assert row.source
        assert row.source_row
        assert any(values[name] for name in ("tokens_per_second", "mfu", "tflops", "seconds_per_step"))
        assert all(value > 0 for value in values.values() if isinstance(value, int | float)), row
        assert all(values[name] is not None for name in (row.derived or "").split()), row
        assert max(row.mfu or 0, row.hfu or 0) < 100
        assert row.checkpointing in (None, "none", "full", "selective")
        assert row.compiled in (None, "yes", "no")
    # An empty cell is None, and not 0.
    assert (ROWS["mosaicml h100 mpt-7b 8"].network, ROWS["mosaicml h100 mpt-7b 8"].memory_gib) == (None, None)


@pytest.mark.spec("PUBLISHED-02")
@arithmetic
def test_parameters_are_those_of_the_layers() -> None:
    for row in MPTS:
        shape = SHAPES[row.model or ""]
        vectors = shape.vocabulary + (row.sequence_length or 0) + 13 * shape.layers + 2
        assert row.parameters == vectors * shape.width + 12 * shape.layers * shape.width**2, row.row


@pytest.mark.spec("PUBLISHED-03")
@arithmetic
def test_stated_mfu_follows_from_tokens_per_second() -> None:
    with_mfu = [row for row in ROWS.values() if row.mfu is not None]
    computed = {row.row: mfu for row in with_mfu if (mfu := table.computed_mfu(row)) is not None}
    assert [row.row for row in with_mfu if row.row not in computed] == [
        "kempnerforge 13B FSDP 8",
        "kempnerforge TP 4",
        "kempnerforge TP 2 x FSDP 2",
    ]
    for name, mfu in computed.items():
        assert mfu == pytest.approx(ROWS[name].mfu, abs=table.mfu_tolerance(ROWS[name])), name
    # The tolerance detects an error of 1 percent.
    assert all(table.mfu_tolerance(row) < 0.01 * (row.mfu or 0) for row in MPTS)


@pytest.mark.spec("PUBLISHED-04")
@arithmetic
def test_hfu_includes_the_second_forward() -> None:
    for row in MPTS:
        if row.hfu is not None and row.mfu is not None:
            factor = 4 / 3 if row.checkpointing == "full" else 1
            assert row.hfu == pytest.approx(factor * row.mfu, abs=0.012), row.row


# ---- the predictions ------------------------------------------------------------------------------------------------


@pytest.mark.spec("CHECKED-01")
def test_every_row_has_its_predictions_or_a_reason() -> None:
    for name, row in ROWS.items():
        lines = [line for line in LINES if line["row"] == name]
        if name not in CASES:
            assert [line["absent"] for line in lines] == [case_of(row)]
            continue
        stated = [quantity for quantity in QUANTITIES if getattr(row, quantity) is not None]
        assert [line["quantity"] for line in lines] == stated
        for line in lines:
            predicted, measured = float(line["predicted"]), getattr(row, line["quantity"])
            assert float(line["measured"]) == measured
            assert float(line["error_percent"]) == round(100 * (predicted / measured - 1), 2)


@pytest.mark.spec("CHECKED-02")
def test_constants_belong_to_a_generation_and_most_other_rows_are_predicted_within_15_percent() -> None:
    constants: dict[str, set[tuple[str, str]]] = {}
    errors = []
    for line in LINES:
        if line["absent"]:
            continue
        case = CASES[line["row"]]
        constants.setdefault(case.generation, set()).add((line["constants"], line["fitted_on"]))
        assert (line["row"] in line["fitted_on"].split("; ")) is case.is_fitted
        if case.is_fitted:
            assert case.row.num_gpus == (32 if "h200" in line["row"] else 8)
        elif line["quantity"] != "memory_gib":
            errors.append(abs(float(line["error_percent"])))
    assert all(len(found) == 1 for found in constants.values())
    # The aims of the page.
    assert median(errors) <= 8
    assert sum(error <= 15 for error in errors) / len(errors) >= 0.9


@pytest.mark.spec("CHECKED-02")
def test_the_fit_finds_the_constants_of_a_made_up_card() -> None:
    cases, recorded = [], {}
    # Long computation next to short communication, and the reverse.
    for name, flops in (("mosaicml h100 mpt-1b 8", 4e13), ("mosaicml h100 mpt-3b 16", 8e12)):
        case = CASES[name]
        for setup, _ in parts_of(case.setup):
            assert not isinstance(setup.model, str)
            gather = Collective(1, "AG", tuple(range(setup.num_ranks)), 2**30)
            kernel = Kernel(0, "aten::mm", flops, 2**20, torch.bfloat16, "forward", flops)
            tape = Tape()
            tape.items = setup.model.layers * setup.accumulation * [gather, kernel]
            recorded[setup] = Recording(setup, tape, [], 0, 1)
        seen = predictions.predict(case, Constants(0.53, 0.2), recorded)["tokens_per_second"]
        cases.append(dataclasses.replace(case, row=dataclasses.replace(case.row, tokens_per_second=seen)))
    found = predictions.fit(cases, recorded)
    assert found == (pytest.approx(0.53, abs=0.02), 0.2)
    assert predictions.fit(cases[:1], recorded).slowdown == 0


@pytest.mark.spec("CHECKED-03")
def test_a_row_is_predicted_again() -> None:
    (line,) = (line for line in LINES if line["row"] == CHEAP)
    case = CASES[CHEAP]
    efficiency, slowdown = (float(part.partition("=")[2]) for part in line["constants"].split())
    recorded = {setup: record(setup) for setup, _ in parts_of(case.setup)}
    again = predictions.predict(case, Constants(efficiency, slowdown), recorded)
    assert again["tokens_per_second"] == pytest.approx(float(line["predicted"]), rel=1e-4)


@pytest.mark.spec("CHECKED-03")
def test_few_blocks_and_micro_batches_stand_for_all() -> None:
    shape = dataclasses.replace(SHAPES["mpt-125m"], layers=14)
    setup = Setup(shape, 8, api="fsdp1", micro_batch=4, sequence=1024, accumulation=4)
    case = dataclasses.replace(CASES[CHEAP], setup=setup, card=CARDS["A100-40"])
    recorded = {part: record(part) for part, _ in parts_of(setup)}
    found = predictions.predict(case, Constants(0.7, 0.2), recorded)
    card = dataclasses.replace(case.card, efficiency=0.7, slowdown=0.2)
    exact = replay(record(setup), card, case.network)
    assert found["tokens_per_second"] == pytest.approx(exact.tokens_per_second, rel=0.01)
    assert found["tflops"] * 1e12 == pytest.approx(exact.hfu * case.card.matmul, rel=0.01)
    assert found["memory_gib"] * 2**30 == pytest.approx(exact.peak_held, rel=0.01)


@pytest.mark.spec("CHECKED-05")
def test_the_page_names_each_row_that_the_simulator_fails() -> None:
    page = (table.FILE.parents[1] / "tools" / "simulator-checked.md").read_text(encoding="utf-8")
    far = [
        line["row"]
        for line in LINES
        if line["row"].startswith("mosaicml") and not line["fitted"] and abs(float(line["error_percent"])) > 15
    ]
    assert len(far) == 2
    assert [row for row in far if f"`{row}`" not in page] == []


# ---- a CPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CHECKED-06")
@arithmetic
def test_a_cpu_thread_that_computes_issues_nothing_meanwhile() -> None:
    # Two kernels, next to an all-gather for which the second one waits, and another all-gather.
    kernel = Kernel(0, "aten::mm", 400.0, 0, torch.float32, "forward", 400.0)
    gather = Collective(1, "AG", (0, 1), 1000)
    tape = Tape()
    tape.items = [gather, RecordEvent(1, 7), kernel, WaitEvent(0, 7), kernel, gather]
    recording = Recording(Setup("gpt2", 2, 2, param_dtype="fp32", reduce_dtype="fp32"), tape, [], 0, 1)
    speed: dict[str, Any] = {"matmul": 100.0, "matmul32": 100.0, "bandwidth": 1e9, "memory": 0.0}
    free = dict.fromkeys(("kernel", "host_operator", "host_collective", "host_event", "slowdown"), 0.0)
    cpu = Card("CPU", **speed, efficiency=1.0, bandwidth_efficiency=1.0, **free, is_cpu=True)
    network = Network(2, costs={("all-gather", 2): (0.0, 200.0)})
    # An all-gather takes 5 seconds: kernels from 0 to 4 and from 5 to 9, then the second all-gather until 14.
    assert replay(recording, cpu, network).seconds == 14.0
    # A card computes while its CPU thread issues the second all-gather, which follows the first one at once.
    assert replay(recording, dataclasses.replace(cpu, is_cpu=False), network).seconds == 10.0
