"""The command that measures the cost of the checks: the checks that are on while it measures, and its output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from minifsdp.checks.collective import Collective
from minifsdp.debugging import switch
from minifsdp.engine.events import events
from spec_tests.harness import ranks
from spec_tools.benchmarks import debug_cost


@pytest.mark.spec("DEBUG-12")
@pytest.mark.cpu
@ranks(2)
def test_each_check_is_on_in_one_half_of_a_pair_and_off_in_the_other() -> None:
    for name, checks in debug_cost.CHECKS.items():
        seen: list[tuple[set[str], bool]] = []

        def look(seen: list[tuple[set[str], bool]] = seen) -> None:
            seen.append((set(switch._running), events.collective is Collective))

        for on_first in (True, False):
            seen.clear()
            debug_cost._pair(look, name, on_first, repeats=True)
            on, off = (seen[:2], seen[2:]) if on_first else (seen[2:], seen[:2])
            wanted = set() if name == debug_cost.ALWAYS_ON else set(checks or switch.CHECKS)
            assert on == [(wanted, True)] * 2
            assert off == [(set(), name != debug_cost.ALWAYS_ON)] * 2


@pytest.mark.spec("DEBUG-12")
@pytest.mark.parametrize("records", [False, True])
def test_the_command_writes_what_the_ranks_have_measured(
    records: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ratios = {"wall": 1.25, "cpu": 1.5}
    measured = {
        "step": dict.fromkeys(debug_cost.CHECKS, ratios),
        "start": dict.fromkeys(debug_cost.AT_START, ratios),
        "step_ms": 9.0,
        "start_ms": 20.0,
    }
    apis = dict.fromkeys(debug_cost.APIS, measured)
    asked: list[Any] = []

    def spawn(function: Any, arguments: Any, nprocs: int) -> None:
        folder, *rest = arguments
        asked.append((function, rest, nprocs))
        Path(folder, "found.json").write_text(json.dumps(apis))

    monkeypatch.setattr(debug_cost.mp, "spawn", spawn)
    monkeypatch.setattr(debug_cost, "circumstances", lambda seconds: ["* today"])
    monkeypatch.setattr(debug_cost, "RECORD", tmp_path / "debug-cost.json")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        sys, "argv", ["debug_cost", "--workload=tiny", "--steps=2", "--starts=1", *["--record"] * records]
    )
    debug_cost.main()
    assert asked == [(debug_cost._rank, ["tiny", 2, 1], debug_cost.NUM_RANKS)]
    shown = capsys.readouterr().out
    assert all(f"{api:26}{name:10}" in shown for api in debug_cost.APIS for name in debug_cost.CHECKS)
    assert debug_cost.RECORD.exists() is records
    if records:
        written = json.loads(debug_cost.RECORD.read_text())
        assert written["apis"] == apis
        assert (written["steps"], written["starts"], written["circumstances"]) == (2, 1, ["* today"])
