"""The predictions of the published rows: the file is complete and consistent, and the simulator still computes it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minifsdp_tools.simulate.machine import CARDS, Network
from minifsdp_tools.simulate.recording import Recording, record
from minifsdp_tools.simulate.replay import replay
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import SHAPES
from minifsdp_tools.simulate.tape import Collective, Kernel, RecordEvent, Tape, WaitEvent
from spec_tools.published import compare, measured, page, recordings, table
from spec_tools.published.here import card_of
from spec_tools.published.measured import Measured
from spec_tools.published.setups import ASSUMED, Absent, Case, case_of, parts_of

arithmetic = pytest.mark.proof("arithmetic")
ROWS = {row.row: row for row in table.load()}
LINES = compare.load()
CASES = {name: case for name, row in ROWS.items() if isinstance(case := case_of(row), Case)}
CHEAP = "mosaicml h100 mpt-1b 16"


def constants_of(line: compare.Line) -> compare.Constants:
    numbers = dict(part.split("=") for part in line.constants.split(" "))
    fitted_on = tuple(line.fitted_on.split("; "))
    return compare.Constants(float(numbers["efficiency"]), float(numbers["slowdown"]), fitted_on)


# ---- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CHECKED-01")
def test_every_row_has_its_predictions_or_a_reason() -> None:
    assert list(dict.fromkeys(line.row for line in LINES)) == list(ROWS)
    for name, row in ROWS.items():
        lines = [line for line in LINES if line.row == name]
        if name in CASES:
            stated = [q for q in ("tokens_per_second", "tflops", "memory_gib") if getattr(row, q) is not None]
            assert [line.quantity for line in lines] == stated
            assert [line.measured for line in lines] == [getattr(row, quantity) for quantity in stated]
            assert not any(line.absent for line in lines)
        else:
            absent = case_of(row)
            assert isinstance(absent, Absent)
            assert [(line.absent, line.predicted, line.quantity) for line in lines] == [(absent.reason, None, "")]


@pytest.mark.spec("CHECKED-01")
@arithmetic
def test_errors_are_those_of_the_figures_in_the_file() -> None:
    predicted = [line for line in LINES if not line.absent]
    assert len(predicted) > 50
    for line in predicted:
        assert line.predicted is not None
        assert line.measured is not None
        assert line.error_percent == round(100 * (line.predicted / line.measured - 1), 2), line.row


@pytest.mark.spec("CHECKED-02")
def test_constants_belong_to_a_generation_and_rows_of_the_fit_are_marked_and_not_counted() -> None:
    of_generation: dict[str, set[tuple[str, str]]] = {}
    for line in LINES:
        if line.absent:
            continue
        case = CASES[line.row]
        of_generation.setdefault(case.generation, set()).add((line.constants, line.fitted_on))
        chosen = case.is_fitted
        assert (line.row in line.fitted_on.split("; ")) is chosen
        assert bool(line.fitted) is (chosen and line.quantity != "memory_gib")
        assert line.is_prediction is not bool(line.fitted)
        assert set(filter(None, line.assumed.split("; "))) <= ASSUMED.keys()
    assert {generation: len(found) for generation, found in of_generation.items() if len(found) != 1} == {}
    # All rows of the fit have 8 GPUs, except for the card whose rows all have more.
    fitted = {line.row for line in LINES if line.fitted}
    assert {ROWS[name].num_gpus for name in fitted if "h200" not in name} == {8}


@pytest.mark.spec("CHECKED-02")
@arithmetic
def test_the_statistics_leave_out_rows_of_the_fit_and_rows_without_a_prediction() -> None:
    def line(error: float, fitted: str = "") -> compare.Line:
        return compare.Line("row", "tokens_per_second", 1.0, 1.0, error, fitted)

    found = compare.Statistics.of([line(4), line(-16), line(1), line(90, "yes"), compare.Line("x", absent="why")], 15)
    assert (found.count, found.median, round(found.within, 3)) == (3, 4, 0.667)


@pytest.mark.spec("CHECKED-02")
def test_the_fit_finds_the_constants_of_a_made_up_card() -> None:
    cases, recorded = [], {}
    hidden = compare.Constants(0.53, 0.2, ())
    for name in ("mosaicml h100 mpt-1b 8", "mosaicml h100 mpt-3b 16"):
        # Long computation next to short communication, and the reverse.
        case = CASES[name]
        for setup, _ in parts_of(case.setup):
            recorded[setup] = made_up(setup, 4e13 if "1b" in name else 8e12)
        seen = compare.predict(case, hidden, recorded).tokens_per_second
        row = dataclasses.replace(case.row, tokens_per_second=seen)
        cases.append(dataclasses.replace(case, row=row))
    found = compare.fit(cases, recorded)
    assert (found.slowdown, found.fitted_on) == (0.2, tuple(case.row.row for case in cases))
    assert found.efficiency == pytest.approx(0.53, abs=0.02)
    assert compare.fit(cases[:1], recorded).slowdown == 0


def made_up(setup: Setup, flops: float) -> Recording:
    """A recording with an all-gather next to one kernel for each block and micro-batch."""
    assert not isinstance(setup.model, str)
    tape = Tape()
    for _ in range(setup.model.layers * setup.accumulation):
        tape.items.append(Collective(1, "AG", tuple(range(setup.num_ranks)), 2**30))
        tape.items.append(Kernel(0, "aten::mm", flops, 2**20, torch.bfloat16, "forward", flops))
    return Recording(setup, tape, [], 0, 1)


# ---- the simulator --------------------------------------------------------------------------------------------------


@pytest.mark.spec("CHECKED-03")
def test_a_row_is_predicted_again() -> None:
    (line,) = (line for line in LINES if line.row == CHEAP)
    case = CASES[CHEAP]
    recorded = {setup: record(setup) for setup, _ in parts_of(case.setup)}
    (again,) = compare.lines_of(case, constants_of(line), recorded)
    assert again == line


@pytest.mark.spec("CHECKED-03")
def test_few_blocks_and_micro_batches_stand_for_all() -> None:
    setup = Setup(
        dataclasses.replace(SHAPES["mpt-125m"], layers=14), 8, api="fsdp1", micro_batch=4, sequence=1024, accumulation=4
    )
    case = dataclasses.replace(CASES[CHEAP], setup=setup, card=CARDS["A100-40"])
    constants = compare.Constants(0.7, 0.2, ())
    found = compare.predict(case, constants, {part: record(part) for part, _ in parts_of(setup)})
    whole = record(setup)
    exact = replay(whole, dataclasses.replace(case.card, efficiency=0.7, slowdown=0.2), case.network)
    assert found.seconds == pytest.approx(exact.seconds, rel=0.01)
    assert found.tokens_per_second == pytest.approx(exact.tokens_per_second, rel=0.01)
    assert found.tflops * 1e12 == pytest.approx(exact.hfu * case.card.matmul, rel=0.01)
    assert found.memory_gib * 2**30 == pytest.approx(exact.peak_held, rel=0.01)


@pytest.mark.spec("CHECKED-03")
def test_recordings_are_kept_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(dataclasses.replace(SHAPES["mpt-125m"], layers=1), 8, sequence=64)
    first = recordings.path_of(setup, "sources", tmp_path)
    assert first != recordings.path_of(setup, "other sources", tmp_path)
    assert first != recordings.path_of(dataclasses.replace(setup, num_ranks=16), "sources", tmp_path)
    monkeypatch.setattr(recordings, "hash_of_sources", lambda: "sources")
    found = recordings.recorded([setup], 1, tmp_path)
    assert found[setup].setup == setup
    written = first.stat().st_mtime_ns
    again = recordings.recorded([setup], 1, tmp_path)
    assert again[setup].tape.items == found[setup].tape.items
    assert first.stat().st_mtime_ns == written


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("CHECKED-05")
def test_the_page_has_the_tables_of_the_file() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.inserted(text, LINES) == text
    with pytest.raises(ValueError, match="between which"):
        page.inserted("no marks", LINES)


@pytest.mark.spec("CHECKED-05")
def test_the_page_names_each_row_that_the_simulator_fails() -> None:
    text = page.PAGE.read_text(encoding="utf-8").partition(page.BEGIN)[0]
    mosaicml = [line for line in LINES if line.is_prediction and line.row.startswith("mosaicml")]
    far = [line.row for line in mosaicml if abs(line.error_percent or 0) > page.TIME_BOUND]
    assert [row for row in far if f"`{row}`" not in text] == []


# ---- this machine ---------------------------------------------------------------------------------------------------


def tape_of_one_step() -> Recording:
    """Two kernels, next to an all-gather for which the second one waits."""
    tape = Tape()
    tape.items = [
        Collective(1, "AG", (0, 1), 1000),
        RecordEvent(1, 7),
        Kernel(0, "aten::mm", 100.0, 0, torch.float32, "forward", 100.0),
        WaitEvent(0, 7),
        Kernel(0, "aten::mm", 100.0, 0, torch.float32, "forward", 100.0),
        Collective(1, "AG", (0, 1), 1000),
    ]
    setup = Setup("gpt2", 2, 2, param_dtype="fp32", reduce_dtype="fp32")
    return Recording(setup, tape, [], 0, 1)


MEASURED = Measured(100.0, 1e9, 0.0, {"forward": 8.0}, [], 0.0, {})


@pytest.mark.spec("CHECKED-06")
@arithmetic
def test_operators_on_the_cpu_take_the_measured_time_of_their_phase() -> None:
    recording = tape_of_one_step()
    # The two operators of forward take 2 seconds by their operations, and 8 were measured.
    card = card_of(MEASURED, recording)
    kernels = [item for item in recording.tape.items if isinstance(item, Kernel)]
    assert [card.seconds(kernel) for kernel in kernels] == [4.0, 4.0]


@pytest.mark.spec("CHECKED-06")
@arithmetic
def test_a_cpu_thread_that_computes_issues_nothing_meanwhile() -> None:
    recording = tape_of_one_step()
    card = dataclasses.replace(card_of(MEASURED, recording), host_collective=0.0)
    network = Network(2, costs={("all-gather", 2): (0.0, 200.0)})
    # An all-gather takes 5 seconds: kernels from 0 to 4 and from 5 to 9, then the second all-gather until 14.
    assert replay(recording, card, network).seconds == 14.0
    # A card computes while its CPU thread issues the second all-gather, which follows the first one at once.
    assert replay(recording, dataclasses.replace(card, is_cpu=False), network).seconds == 10.0


@pytest.mark.spec("CHECKED-06")
@arithmetic
def test_a_measurement_ends_when_all_ranks_have_done_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def pass_seconds(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(measured.time, "perf_counter", lambda: clock[0])
    # The other ranks need 5 seconds more than this one.
    monkeypatch.setattr(measured.dist, "barrier", lambda: pass_seconds(5.0))
    assert measured._seconds(lambda: pass_seconds(3.0), 2) == 8.0


@pytest.mark.spec("CHECKED-06")
def test_steps_of_this_machine_are_predicted_and_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    command = [sys.executable, "-m", "spec_tools.published.here", "--ranks", "2", "--workloads", "tiny"]
    command += ["--strategies", "FULL_SHARD", "NO_SHARD", "HYBRID_SHARD", "--file", str(path)]
    command += ["--rounds", "2", "--repeats", "1"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(recordings.ROOT))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    # Two ranks have no hybrid strategy.
    assert [(row["workload"], row["num_ranks"], row["strategy"]) for row in rows] == [
        ("tiny", 2, "FULL_SHARD"),
        ("tiny", 2, "NO_SHARD"),
    ]
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in rows)
