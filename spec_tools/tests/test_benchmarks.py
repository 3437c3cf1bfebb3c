"""The report of the benchmarks, and what a step sends. The benchmarks themselves are not run by the test command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_tests.harness import ranks
from spec_tools.benchmarks import page, steps
from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.workloads import WORKLOADS

MIB = 2**20


def measured(contender: str, median: float) -> dict[str, Any]:
    """A step of `gpt` as pytest-benchmark stores it."""
    figures = {"asked": 5 * MIB, "inside": 3 * MIB, "wired": 6 * MIB, "between_steps": 7 * MIB, "peak": 9 * MIB}
    curve = [(0.0, 7 * MIB), (0.33333, 9 * MIB), (1.0, 7 * MIB)]
    extra = {"contender": contender, "difference": 0.0, "cpu": 0.2, "calls": 100, "curve": curve, **figures}
    stats = {"median": median, "q1": 0.9 * median, "q3": 1.1 * median, "rounds": 3}
    return {"group": "gpt", "stats": stats, "extra_info": extra}


def test_table_and_data_of_the_pictures_are_recorded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "page.md"
    written.write_text(f"before\n{page.BEGIN}old\n{page.END}after\n")
    times = {**dict.fromkeys(CONTENDERS, 1.5), "torch FSDP1 flat": 1.0, "minifsdp flat": 0.75}
    monkeypatch.setattr(page, "checks", lambda results: {})
    monkeypatch.setattr(page, "WORKLOADS", {"gpt": WORKLOADS["gpt"]})
    page.record({"benchmarks": [measured(*one) for one in times.items()]}, 90.0, written, tmp_path)
    text, record = written.read_text(), json.loads((tmp_path / "benchmarks.json").read_text())
    assert text.startswith(f"before\n{page.BEGIN}\n* recorded ")
    assert text.endswith(f"{page.END}after\n")
    assert "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| minifsdp flat"))
    # The fastest FSDP of torch is the one with flat parameters, which is also the peer.
    assert row.startswith("| minifsdp flat | 750.0 | 0.75 [0.68-0.82] | 0.75 | 200.0 | 0 | 5.00 | 3.00 | 6.00 |")
    assert all(fact in text for fact in record["circumstances"])
    assert record["ratios"]["gpt"]["minifsdp flat"] == {"low": 0.675, "median": 0.75, "high": 0.825}
    assert record["memory"]["minifsdp flat"] == [[0.0, 7.0], [0.3333, 9.0], [1.0, 7.0]]


@ranks(4)
@pytest.mark.cpu
def test_a_hybrid_step_shards_inside_of_a_group_and_reduces_between_groups() -> None:
    workload = replace(WORKLOADS["tiny"], strategy="HYBRID_SHARD", num_ranks=4)
    whole = 48 * 4 * (32 * 32 + 32)
    sent = {}
    for name in ("DDP", "minifsdp flat", "minifsdp FSDP2"):
        trainer, batches = steps.Trainer(name, workload), workload.batches(0, 0)
        # DDP sends its order of parameters in the second step.
        trainer.step(batches)
        found = steps.figures(lambda trainer=trainer, batches=batches: trainer.step(batches))
        sent[name] = found["inside"], found["asked"] - found["inside"]
    # Two all-gathers and a reduce-scatter in a group of two, then an all-reduce of this rank's half.
    assert sent["minifsdp flat"] == sent["minifsdp FSDP2"] == (3 * whole // 2, whole // 2)
    assert sent["DDP"] == (0, 2 * whole * 3 // 4)


@ranks(2)
@pytest.mark.cpu
def test_a_contender_that_trains_to_other_losses_is_refused() -> None:
    workload = WORKLOADS["tiny"]
    assert steps.check_losses(steps.Trainer("minifsdp flat", workload), "minifsdp flat") <= workload.tolerance
    # Each rank trains on its own batches only.
    with pytest.raises(AssertionError, match="to other losses than one process does"):
        steps.check_losses(steps.Trainer("single", workload), "minifsdp flat")


def test_plot_keeps_maximum_of_each_step_part() -> None:
    moments = [(1000 + number, number % 7) for number in range(10_001)]
    moments[5_000] = (6_000, 99)
    kept = steps.highest_of_each_part(moments)
    assert len(kept) <= steps.NUM_PARTS + 1
    assert max(kept, key=lambda point: point[1]) == (0.5, 99)


def test_fully_shard_takes_part_only_where_it_has_the_settings() -> None:
    missing = {
        name: {workload.name for workload in WORKLOADS.values() if not contender.runs(workload)}
        for name, contender in CONTENDERS.items()
    }
    assert missing["minifsdp FSDP2"] == missing["torch FSDP2"] == {"gpt-no-shard", "wide-no-prefetch"}
    assert missing["minifsdp flat"] == missing["DDP"] == set()
