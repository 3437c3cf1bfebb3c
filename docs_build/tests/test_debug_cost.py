"""The table of the cost of the checks of ``minifsdp.debug()``, generated from the recorded measurement."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from docs_build.pages import costs
from docs_build.recording import records
from spec_tools.benchmarks import debug_cost


@pytest.mark.spec("DEBUG-12")
def test_table_is_generated_from_the_output_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert debug_cost.RECORD.parent == records.DATA
    monkeypatch.setattr(records, "DATA", tmp_path)
    assert costs.checks() == "No run is recorded."
    ratios = {"wall": 1.25, "cpu": 1.5}
    steps = dict.fromkeys(debug_cost.CHECKS, ratios)
    found = {"step": steps, "start": {"meta": ratios}, "step_ms": 9.0, "start_ms": 1e4}
    apis = dict.fromkeys(debug_cost.APIS, found)
    head = {"circumstances": ["* recorded today"], "model": "a model", "steps": 7, "starts": 3}
    (tmp_path / debug_cost.RECORD.name).write_text(json.dumps({**head, "apis": apis}))
    lines = costs.checks().splitlines()
    assert "| `values` | 1.25 (1.50) |  | 1.25 (1.50) |  |" in lines
    assert "| `meta` | 1.25 (1.50) | 1.25 (1.50) | 1.25 (1.50) | 1.25 (1.50) |" in lines
    assert "| no check | 9 ms | 10,000 ms | 9 ms | 10,000 ms |" in lines
    assert lines[-1] == "* recorded today"


@pytest.mark.spec("DEBUG-12")
def test_confidence_interval_contains_the_median_of_ratios_in_95_of_100_measurements() -> None:
    chance = random.Random(0)
    inside = 0
    for _ in range(1000):
        low, high = debug_cost.interval([chance.lognormvariate(0.0, 0.1) for _ in range(60)])
        inside += low <= 1.0 <= high
    assert 930 <= inside <= 985
    assert debug_cost.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert debug_cost.interval(range(300)) == (132, 167)


@pytest.mark.spec("DEBUG-12")
def test_intervals_in_record_are_shown() -> None:
    assert costs._ratio({"wall": 1.01, "wall_interval": [1.0041, 1.0159], "cpu": 1.0}) == "1.01, 1.004 to 1.016 (1.00)"


@pytest.mark.spec("DEBUG-12")
def test_recorded_run_has_all_checks_and_both_apis() -> None:
    apis = json.loads(debug_cost.RECORD.read_text())["apis"]
    assert tuple(apis) == debug_cost.APIS
    for measured in apis.values():
        assert (*measured["step"], *measured["start"]) == (*debug_cost.CHECKS, *debug_cost.AT_START)
