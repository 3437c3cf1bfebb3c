"""The tables of the fault tests, generated from the records that the commands write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs_build.pages import faults
from docs_build.recording import records
from spec_tools.processes import kills, matrix, restarts, soak

REPORTED = {"circumstances": ["* recorded today"]}


# ---- the records in the documentation ----


@pytest.mark.spec("LEDGER-09", "FAULT-01", "FAULT-02", "FAULT-03")
def test_record_has_every_fault_at_every_stage_of_every_kind_of_training_without_failure() -> None:
    rows = records.load("faults")["rows"]
    there = {(row["kind"], row["stage"], row["fault"]) for row in rows}
    assert {(cell.kind, cell.stage, cell.fault) for cell in matrix.cells()} <= there
    assert all("problem" not in row and 0 <= row["seconds"] < matrix.LIMIT for row in rows)


@pytest.mark.spec("LEDGER-10")
def test_record_has_every_restart_and_all_resumed() -> None:
    rows = records.load("restarts")["rows"]
    assert [restarts.Restart(**{name: row[name] for name in row if name != "seconds"}) for row in rows] == [
        *restarts.restarts()
    ]
    assert all(0 < row["seconds"] < restarts.LIMIT for row in rows)


@pytest.mark.spec("FAULT-04")
@pytest.mark.parametrize("api", kills.APIS)
def test_50_recorded_kills_lose_no_checkpoint(api: str) -> None:
    rows = [row for row in records.load("kills")["rows"] if row["api"] == api]
    assert len(rows) == 50
    assert {row["moment"] for row in rows} >= {moment.name for _, moment in kills.NAMED}
    assert {(row["form"], row["rank"]) for row in rows} >= {("full", 0), ("sharded", 0), ("sharded", 1)}
    assert all(row["resumed from"] in ("step-000002", "step-000004", "step-000006") for row in rows)


@pytest.mark.spec("SOAK-01", "SOAK-02")
def test_2000_recorded_steps_with_each_api_leak_nothing() -> None:
    rows = records.load("soak")["rows"]
    assert [(row["api"], row["steps"]) for row in rows] == [(api, 2000) for api in soak.APIS]
    for row in rows:
        assert row["first"]["step"] <= 500
        assert row["last"]["step"] == 2000
        assert soak.grown([row["first"], row["last"]]) == []


# ---- the tables ----


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(records, "DATA", tmp_path)
    return tmp_path


@pytest.mark.spec("LEDGER-09", "LEDGER-10", "FAULT-04", "FUZZ-01", "SOAK-01")
def test_table_without_record_shows_message(data: Path) -> None:
    tables = (faults.table, faults.by_kind, faults.restarts, faults.kills, faults.fuzz, faults.soak)
    assert {table() for table in tables} == {"No run is recorded."}


@pytest.mark.spec("LEDGER-09")
def test_the_matrix_is_shown_by_stage_and_by_kind_of_training(data: Path) -> None:
    rows = [
        {"kind": "last rank, wrapper, full", "stage": "save", "fault": "raises", "seconds": 1.04},
        {
            "kind": "last rank, wrapper, full",
            "stage": "save",
            "fault": "is slow",
            "seconds": 9.0,
            "problem": "it hangs",
        },
        {"kind": "rank 0, the store on rank 0", "stage": "save", "fault": "raises", "seconds": 5.0},
    ]
    (data / "faults.json").write_text(json.dumps({**REPORTED, "rows": rows}))
    lines = faults.table().splitlines()
    assert "| a rank ... at | raises | is slow |" in lines
    assert "| save | 1.0 to 5.0 | **wrong** |" in lines
    assert "3 cells, on CPUs with gloo, with 2 ranks (hybrid: 4)." in lines
    assert lines[-1] == "* recorded today"
    assert "| rank 0, the store on rank 0 | 5.0 to 5.0 |  |" in faults.by_kind().splitlines()


@pytest.mark.spec("LEDGER-10", "FAULT-04")
def test_restarts_and_kills_are_shown_by_api(data: Path) -> None:
    job = {"api": "wrapper", "strategy": "FULL_SHARD", "fault": "raises", "victim": 1, "moment": "in a step"}
    rows = [{**job, "seconds": 12}, {**job, "api": "fully_shard", "seconds": 12, "problem": "it hangs"}]
    (data / "restarts.json").write_text(json.dumps({**REPORTED, "rows": rows}))
    assert "| raises, in a step | rank 1: 12 s | **wrong** |" in faults.restarts().splitlines()
    rows = [{"api": api, "moment": "before the rename"} for api in ("wrapper", "wrapper", "fully_shard")]
    (data / "kills.json").write_text(json.dumps({**REPORTED, "rows": rows}))
    assert "| before the rename | 2 | 1 |" in faults.kills().splitlines()
    assert "3 kills. Checkpoints lost: 0." in faults.kills().splitlines()


@pytest.mark.spec("FUZZ-01", "SOAK-01")
def test_long_fuzz_runs_are_shown_with_their_counts(data: Path) -> None:
    zeros = dict.fromkeys(faults.PROGRAMS, 0)
    runs = [{"api": api, "apart": apart, **zeros} for api in ("wrapped", "composed") for apart in (False, True)]
    (data / "fuzz.json").write_text(json.dumps({**REPORTED, "runs": [{**run, "programs": 1500} for run in runs]}))
    lines = faults.fuzz().splitlines()
    assert "| `fully_shard`, ranks do different things | 1,500 | 0 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert "6,000 programs in all." in lines
    sample = {**dict.fromkeys(faults.HELD, 0), "step": 500, "resident_bytes": 412 * 2**20}
    reported = {"api": "wrapper", "first": sample, "last": {**sample, "step": 2000}}
    (data / "soak.json").write_text(json.dumps({**REPORTED, "rows": [reported]}))
    lines = faults.soak().splitlines()
    assert lines[0] == "| on rank 0 | `wrapper`, after step 500 | `wrapper`, after step 2,000 |"
    assert "| memory of the process | 412 MiB | 412 MiB |" in lines
