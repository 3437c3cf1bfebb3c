"""The tables of the fault tests, generated from the records that the commands write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs_build.pages import faults
from docs_build.recording import records
from spec_tools.faults import __main__ as matrix
from spec_tools.faults import restarts
from spec_tools.faults.cells import Cell, Outcome
from spec_tools.fuzz import __main__ as fuzz
from spec_tools.fuzz.__main__ import summary
from spec_tools.kills import __main__ as kills
from spec_tools.soak import __main__ as soak
from spec_tools.soak.watch import Sample

REPORTED = {"circumstances": ["* recorded today"]}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    written = [module.RECORD for module in (matrix, restarts, kills, fuzz, soak)]
    assert {(path.parent, path.stem) for path in written} == {
        (records.DATA, name) for name in ("faults", "restarts", "kills", "fuzz", "soak")
    }
    monkeypatch.setattr(records, "DATA", tmp_path)
    return tmp_path


@pytest.mark.spec("LEDGER-09", "LEDGER-10", "FAULT-04", "FUZZ-01", "SOAK-01")
def test_table_without_record_shows_message() -> None:
    tables = (faults.table, faults.by_kind, faults.restarts, faults.kills, faults.fuzz, faults.soak)
    assert {table() for table in tables} == {"No run is recorded."}


@pytest.mark.spec("LEDGER-09")
def test_the_matrix_is_shown_by_stage_and_by_kind_of_training(data: Path) -> None:
    cells = [
        Cell("wrapper", "full", "last rank", "raises", "save"),
        Cell("wrapper", "full", "last rank", "is slow", "save"),
        Cell("function", "hybrid", "rank 0", "raises", "save"),
        Cell("function", "hybrid", "rank 0", "is slow", "save"),
        Cell("function", "full", "rank 0", "raises", "save", "of rank 0"),
    ]
    outcomes = [Outcome(cell, 1.04 + number, "") for number, cell in enumerate(cells)]
    outcomes[1] = Outcome(cells[1], 9.0, "it hangs")
    reported = matrix.written({**REPORTED, "timeout": 4.0}, matrix.rows_of(outcomes))
    (data / "faults.json").write_text(reported)
    lines = faults.table().splitlines()
    assert "| a rank ... at | raises | is slow |" in lines
    assert "| save | 1.0 to 5.0 | **wrong** |" in lines
    assert "5 cells, on CPUs with gloo, with 2 ranks (hybrid: 4). The timeout of the groups is 4 s." in lines
    assert lines[-1] == "* recorded today"
    kinds = faults.by_kind().splitlines()
    assert "| last rank, wrapper, full | 1.0 to 1.0 | **wrong** |" in kinds
    assert "| rank 0, function, hybrid | 3.0 to 3.0 | 4.0 to 4.0 |" in kinds
    assert "| rank 0, the store on rank 0 | 5.0 to 5.0 |  |" in kinds


@pytest.mark.spec("LEDGER-10")
def test_restart_table_groups_by_fault_and_api(data: Path) -> None:
    jobs = [{**vars(restart), "seconds": 12} for restart in restarts.every_restart()]
    jobs[0]["seconds"] = None
    (data / "restarts.json").write_text(json.dumps({**REPORTED, "jobs": jobs}))
    lines = faults.restarts().splitlines()
    assert len(lines) == 2 + 5 * 2 + 2
    assert lines[2].startswith("| raises in a step | **wrong** | rank ")
    assert lines[3].count(": 12 s") == 4


@pytest.mark.spec("FAULT-04")
def test_kills_are_counted_by_moment(data: Path) -> None:
    rows = [
        {"api": api, "moment": moment.name, "went on from": "step-000002"}
        for api in kills.APIS
        for moment in kills.drawn_moments(50)
    ]
    rows[0] = {"api": "wrapper", "moment": rows[0]["moment"], "wrong": "lost"}
    (data / "kills.json").write_text(json.dumps({**REPORTED, "kills": rows}))
    lines = faults.kills().splitlines()
    assert "| some milliseconds after it began | 10 | 10 |" in lines
    assert "| before any call | 10 | 10 |" in lines
    assert "| **all, checkpoints lost** | **50, 1** | **50, 0** |" in lines
    assert "Checkpoints lost: 1." in lines


@pytest.mark.spec("FUZZ-01", "SOAK-01")
def test_long_fuzz_runs_are_shown_with_their_counts(data: Path) -> None:
    runs = [{"api": api, "apart": apart, **summary([])} for api, apart, _ in fuzz.RECORDED]
    (data / "fuzz.json").write_text(json.dumps({**REPORTED, "runs": [{**run, "programs": 1500} for run in runs]}))
    lines = faults.fuzz().splitlines()
    assert "| `fully_shard`, ranks do different things | 1,500 | 0 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert "6,000 programs in all." in lines
    sample = Sample(500, 214, 381_532, 41, 14, 198, 0, 3000, 8, 912_344, 412 * 2**20, {})
    reported = {"api": "wrapper", "first": vars(sample), "last": {**vars(sample), "step": 2000}}
    (data / "soak.json").write_text(json.dumps({**REPORTED, "runs": [reported]}))
    lines = faults.soak().splitlines()
    assert lines[0] == "| on rank 0 | `wrapper`, after step 500 | `wrapper`, after step 2,000 |"
    assert "| memory of the process | 412 MiB | 412 MiB |" in lines
