"""The suite on another implementation than minifsdp."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from spec_tools.tests.test_session import run_session

TESTS = """
import pytest
from minifsdp.engine import shards
from spec_tests.subject import FullyShardedDataParallel, fully_shard, share_comm_ctx

FSDP = FullyShardedDataParallel

def helper():
    return shards.shard_of

@pytest.mark.spec("CTOR-01")
def test_of_the_engine():
    assert ("torch" in FullyShardedDataParallel.__module__) is {is_torch}

@pytest.mark.spec("CTOR-05")
def test_of_the_engine_under_another_name():
    assert FSDP

@pytest.mark.spec("CTOR-02")
def test_of_own_code_through_a_helper():
    assert fully_shard and helper()

@pytest.mark.spec("CTOR-03")
def test_of_a_formula():
    assert 1 + 1 == 2

@pytest.mark.spec("CTOR-04")
def test_of_a_name_that_is_not_always_offered():
    share_comm_ctx([])
"""

ROWS = ("CTOR-01", "CTOR-02", "CTOR-03", "CTOR-04", "CTOR-05")
ADAPTER = """
from minifsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard, trace, wrap
"""


def session(folder: pathlib.Path, engine: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """The output, the outcome by requirement, and the error by test."""
    output = run_session(folder, TESTS.replace("{is_torch}", str(engine == "torch")), "--engine", engine).stdout
    results = json.loads((folder / "build" / f"spec-results-{engine}.json").read_text())
    errors = json.loads((folder / "build" / f"spec-errors-{engine}.json").read_text())
    rows = {row: results[row]["results"]["cpu-gloo"] for row in ROWS}
    return output, rows, errors


@pytest.mark.spec("ENGINE-01", "ENGINE-02")
def test_tests_run_on_the_fsdps_of_torch(tmp_path: pathlib.Path) -> None:
    output, rows, errors = session(tmp_path, "torch")
    assert [rows[row] for row in ROWS] == ["proven", "unproven", "unproven", "proven", "proven"]
    assert errors == {}
    assert "rows of docs/spec.md proven on cpu-gloo with the engine torch" in output
    assert "1 tests of minifsdp's own code and of features that only it has not run (--engine torch)" in output
    assert "1 tests that use no FSDP not run (--engine torch)" in output
    assert not (tmp_path / "build" / "spec-results.json").exists()


@pytest.mark.spec("ENGINE-03")
def test_name_that_the_adapter_omits_is_recorded_as_not_offered(tmp_path: pathlib.Path) -> None:
    (tmp_path / "small_adapter.py").write_text(ADAPTER)
    _, rows, errors = session(tmp_path, "small_adapter")
    assert (rows["CTOR-01"], rows["CTOR-04"]) == ("proven", "failed")
    (error,) = errors.values()
    assert error.endswith("the engine small_adapter does not offer share_comm_ctx")


EVENTS = """
import pytest
from spec_tests.harness import ranks
from spec_tests.models.running import Wire, batch, loss_of
from spec_tests.models.sharding import sharded, wrapped
from spec_tests.subject import trace

@pytest.mark.parametrize("build", [wrapped, sharded])
@ranks(2)
def test_events(build):
    model = build()
    loss_of(model(batch())).backward()
    with trace.record() as recorder, Wire() as wire:
        loss_of(model(batch())).backward()
    for kind in ("AG", "RS"):
        assert len(wire.calls(kind)) == recorder.count(kind) > 4, kind
    units = {"", *(f"blocks.{index}" for index in range(4))}
    for kind in ("AG", "F", "B", "FREE", "RS"):
        assert {event.unit for event in recorder.events if event.kind == kind} == units, kind
    gathers = [event for event in recorder.events if event.kind == "AG"]
    assert all(event.ranks == (0, 1) for event in gathers)
    sizes = [event.num_bytes // event.dtype.itemsize for event in gathers]
    assert sizes == [numel for kind, numel in wire.sent if kind == "AG"]
"""


@pytest.mark.spec("ENGINE-04")
@pytest.mark.parametrize("engine", ["minifsdp", "torch"])
def test_recorded_events_are_the_collectives_that_pytorch_executes(tmp_path: pathlib.Path, engine: str) -> None:
    ended = run_session(tmp_path, EVENTS, "--engine", engine)
    assert "2 passed" in ended.stdout, ended.stdout


HANGING: Any = """
import time
from spec_tests.harness import ranks

@ranks(2)
def test_that_hangs():
    time.sleep(50)
"""


@pytest.mark.spec("ENGINE-05")
def test_limit_of_the_session_ends_tests_with_longer_limits(tmp_path: pathlib.Path) -> None:
    output = run_session(tmp_path, HANGING, "--limit", "2").stdout
    assert "1 failed" in output
    assert "hang: no answer from ranks [0" in output
