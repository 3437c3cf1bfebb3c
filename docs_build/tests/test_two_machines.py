"""The table of the page "Train on several machines"."""

import pytest

from docs_build.recording import records, two_machines

RUNS = [
    {"rate": rate, "api": api, "strategy": strategy, "sent": 10_000_000, "seconds": seconds}
    for rate in (1e9, 1e8)
    for strategy in ("FULL_SHARD", "HYBRID_SHARD")
    for api, seconds in (("wrapper", 1.25), ("fully_shard", 2.5))
]
RECORD = {"date": "2026-01-02", "machine": "a machine", "parameters": 3_000_000, "runs": RUNS}


def test_table_has_a_row_for_each_link_and_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "load", lambda name: RECORD)
    lines = two_machines.two_machines().splitlines()
    assert lines[2] == "| 1 Gbit/s | `FULL_SHARD` | 10.0 MB | 0.08 s | 1.25 s | 2.50 s |"
    assert lines[5] == "| 100 Mbit/s | `HYBRID_SHARD` | 10.0 MB | 0.80 s | 1.25 s | 2.50 s |"
    assert lines[-1] == "2026-01-02, a machine; a model of 3.0 million parameters."


def test_recorded_steps_are_not_faster_than_the_link() -> None:
    record = records.load(two_machines.NAME)
    assert {run["rate"] for run in record["runs"]} == set(two_machines.RATES)
    for run in record["runs"]:
        # Headers and confirmations are a part of the bytes that are sent, but not in each step.
        assert run["seconds"] >= 0.98 * 8 * run["sent"] / run["rate"], run
