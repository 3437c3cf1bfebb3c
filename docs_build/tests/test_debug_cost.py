"""The table of the cost of the checks of ``minifsdp.debug()``, generated from the recorded measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs_build.pages import costs
from docs_build.recording import records
from spec_tools.benchmarks import checks, page


def timed(what: str, check: str, seconds: float) -> list[dict[str, object]]:
    """A benchmark of both APIs as pytest-benchmark stores it."""
    extra = {"check": check, "cpu": 2 * seconds}
    return [{"group": f"{what}, {api}", "stats": {"median": seconds}, "extra_info": extra} for api in checks.APIS]


@pytest.mark.spec("DEBUG-12")
def test_table_is_generated_from_the_results_of_the_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "DATA", tmp_path)
    assert costs.checks() == "No run is recorded."
    steps = [*timed("step", "no ledger", 0.4), *timed("step", "off", 0.5), *timed("step", "values", 0.75)]
    starts = [*timed("start", "off", 10), *timed("start", "off, meta", 2), *timed("start", "meta", 3)]
    found = page.checks({"benchmarks": [*steps, *starts]})
    head = {"circumstances": ["* recorded today"], "model": "a model", "steps": 7, "starts": 3}
    (tmp_path / "debug-cost.json").write_text(json.dumps({**head, "apis": found}))
    lines = costs.checks().splitlines()
    assert "| always enabled | 1.25 (1.25) |  | 1.25 (1.25) |  |" in lines
    assert "| `values` | 1.50 (1.50) |  | 1.50 (1.50) |  |" in lines
    assert found["fully_shard"]["start"]["meta"] == {"wall": 1.5, "cpu": 1.5}
    assert "| no check | 500 ms | 10,000 ms | 500 ms | 10,000 ms |" in lines
    assert lines[-1] == "* recorded today"


@pytest.mark.spec("DEBUG-12")
def test_intervals_in_record_are_shown() -> None:
    assert costs._ratio({"wall": 1.01, "wall_interval": [1.0041, 1.0159], "cpu": 1.0}) == "1.01, 1.004 to 1.016 (1.00)"


@pytest.mark.spec("DEBUG-12")
def test_recorded_run_has_all_checks_and_both_apis() -> None:
    apis = records.load("debug-cost")["apis"]
    assert tuple(apis) == checks.APIS
    for measured in apis.values():
        assert (*measured["step"], *measured["start"]) == ("ledger", *checks.CHECKS, *checks.AT_START)
