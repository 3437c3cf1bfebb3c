"""The published measurements agree with each other, and the simulator's predictions with them."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
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

DOCS = Path(__file__).resolve().parents[2] / "docs"
# FLOP/s of dense matrices in 16 bits. MosaicML calculates with 989.5e12.
PEAK_FLOPS = {"A100": 312e12, "H100": 989.5e12}
# FlashAttention 2 reaches about 335 of 989 TFLOP/s, in its publication.
ATTENTION_OF_H100 = 0.34


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a table. An empty cell means that the source does not state the value."""
    with (DOCS / "data" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


ROWS = {row["row"]: row for row in rows_of("published.csv")}
MPTS = [row for row in ROWS.values() if row["model"].startswith("mpt")]
LINES = rows_of("published-predictions.csv")


@pytest.mark.spec("PUBLISHED-01")
def test_each_row_has_a_source_and_a_measurement() -> None:
    assert len(ROWS) == len(rows_of("published.csv"))
    for row in ROWS.values():
        assert row["source"] and row["source_row"]
        assert any(row[name] for name in ("tokens_per_second", "mfu", "tflops", "seconds_per_step"))
        assert all(row[name] for name in row["derived"].split()), row


@pytest.mark.spec("PUBLISHED-02")
@pytest.mark.proof("arithmetic")
@pytest.mark.parametrize("row", MPTS, ids=lambda row: row["row"])
def test_parameters_are_those_of_the_layers(row: dict[str, str]) -> None:
    shape = SHAPES[row["model"]]
    # The embedding, the positions, and in each layer 2 norms and the biases of 4 matrices.
    num_vectors = shape.vocabulary + int(row["sequence_length"]) + 13 * shape.layers + 2
    assert int(row["parameters"]) == num_vectors * shape.width + 12 * shape.layers * shape.width**2


@pytest.mark.spec("PUBLISHED-03", "PUBLISHED-04")
@pytest.mark.proof("arithmetic")
@pytest.mark.parametrize("row", MPTS, ids=lambda row: row["row"])
def test_stated_utilization_follows_from_tokens_per_second(row: dict[str, str]) -> None:
    shape = SHAPES[row["model"]]
    attention = 12 * shape.layers * shape.width * int(row["sequence_length"])
    flops_of_token = 6 * int(row["parameters"]) + attention
    tokens = float(row["tokens_per_second"])
    mfu = 100 * flops_of_token * tokens / PEAK_FLOPS[row["card"].split()[0]]
    # Tokens per second are truncated to an integer, and the MFU has two decimals.
    assert float(row["mfu"]) == pytest.approx(mfu, abs=0.005 + mfu / tokens)
    # Full checkpointing computes the forward twice.
    factor = 4 / 3 if row["checkpointing"] == "full" else 1
    assert float(row["hfu"]) == pytest.approx(factor * float(row["mfu"]), abs=0.012)


# ---- the predictions ------------------------------------------------------------------------------------------------


@pytest.mark.spec("CHECKED-01")
def test_each_row_has_its_predictions_or_a_reason() -> None:
    assert {line["row"] for line in LINES} == ROWS.keys()
    for line in LINES:
        if not line["absent"]:
            measured = float(ROWS[line["row"]][line["quantity"]])
            assert float(line["measured"]) == measured
            assert float(line["error_percent"]) == round(100 * (float(line["predicted"]) / measured - 1), 2)


@pytest.mark.spec("CHECKED-02", "CHECKED-05")
def test_constants_belong_to_a_generation_and_most_other_rows_are_predicted_within_15_percent() -> None:
    predicted = [line for line in LINES if not line["absent"]]
    assert len({(line["fitted_on"], line["constants"]) for line in predicted}) == len(
        {line["fitted_on"] for line in predicted}
    )
    fitted_on = {name for line in predicted for name in line["fitted_on"].split("; ")}
    assert {ROWS[name]["num_gpus"] for name in fitted_on if "h200" in name} == {"32"}
    assert {ROWS[name]["num_gpus"] for name in fitted_on if "h200" not in name} == {"8"}
    others = [line for line in predicted if line["row"] not in fitted_on and line["quantity"] != "memory_gib"]
    errors = [abs(float(line["error_percent"])) for line in others]
    # The aims of the page.
    assert median(errors) <= 8
    assert sum(error <= 15 for error in errors) / len(errors) >= 0.9
    page = (DOCS / "tools" / "simulator-checked.md").read_text(encoding="utf-8")
    far = [line["row"] for line, error in zip(others, errors, strict=True) if error > 15]
    assert [name for name in far if name.startswith("mosaicml") and f"`{name}`" not in page] == []


@pytest.mark.spec("CHECKED-03")
def test_a_row_is_predicted_again() -> None:
    line = next(line for line in LINES if line["row"] == "mosaicml h100 mpt-1b 16")
    efficiency, slowdown = (float(part.partition("=")[2]) for part in line["constants"].split())
    within, between = map(float, line["network"].split())
    card = dataclasses.replace(CARDS["H100"], efficiency=efficiency, slowdown=slowdown, attention=ATTENTION_OF_H100)

    def seconds(num_layers: int) -> float:
        setup = Setup(
            dataclasses.replace(SHAPES["mpt-1b"], layers=num_layers),
            num_ranks=16,
            api="fsdp1",
            micro_batch=20,
            sequence=2048,
            reduce_dtype="bf16",
            backward_prefetch="BACKWARD_POST",
        )
        return replay(record(setup), card, Network(within=within, between=between)).seconds

    # All blocks are equal, so 4 and 8 of them determine the time of all 24.
    four, eight = seconds(4), seconds(8)
    step = eight + (SHAPES["mpt-1b"].layers - 8) / 4 * (eight - four)
    assert 20 * 2048 / step == pytest.approx(float(line["predicted"]), rel=1e-4)


@pytest.mark.spec("CHECKED-06")
@pytest.mark.proof("arithmetic")
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
