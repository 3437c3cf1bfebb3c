"""The short form of the soak: 150 steps with each API, and inserted leaks that must be found."""

from __future__ import annotations

import json
import pathlib
from dataclasses import fields

import pytest

from spec_tests.harness import pool
from spec_tools.soak import job, watch
from spec_tools.soak.__main__ import RECORD

pytestmark = [pytest.mark.ranks, pytest.mark.cpu]


def run(folder: pathlib.Path, api: str, num_steps: int, num_warm: int, leak: str = "none") -> None:
    reported = {"api": api, "strategy": "FULL_SHARD", "num_steps": num_steps, "num_warm": num_warm}
    pool.run(2, job.__name__, job.soak.__name__, {**reported, "folder": str(folder), "leak": leak}, 120.0)


@pytest.mark.spec("SOAK-01", "SOAK-02")
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
def test_memory_does_not_grow_during_training_evaluation_save_and_load(tmp_path: pathlib.Path, api: str) -> None:
    run(tmp_path, api, num_steps=150, num_warm=50)


@pytest.mark.spec("SOAK-01", "SOAK-02")
def test_2000_recorded_steps_with_each_api_leak_nothing() -> None:
    runs = json.loads(RECORD.read_text())["runs"]
    assert [run["api"] for run in runs] == ["wrapper", "fully_shard"]
    for run in runs:
        first, last = watch.Sample(**run["first"]), watch.Sample(**run["last"])
        assert (run["steps"], last.step) == (2000, 2000)
        assert first.step <= 500
        assert run["said"] == "nothing has grown"
        assert watch.grown([first, last]) == []


@pytest.mark.spec("SOAK-03")
@pytest.mark.parametrize("leak", [leak for leak in job.LEAKS if leak != "none"])
def test_a_leak_of_each_kind_is_found(tmp_path: pathlib.Path, leak: str) -> None:
    with pytest.raises(pool.Failure, match=rf"has grown.*{leak}: "):
        run(tmp_path, "wrapper", num_steps=3 * job.ROUND, num_warm=job.ROUND, leak=leak)


@pytest.mark.spec("SOAK-03")
def test_a_table_that_doubles_once_is_not_a_leak() -> None:
    def grown(*sizes: int) -> list[str]:
        empty = dict.fromkeys((field.name for field in fields(watch.Sample)), 0) | {"kinds": {}}
        return watch.grown([watch.Sample(**empty | {"python_bytes": size}) for size in sizes])

    assert grown(0, 10_000, 170_000, 175_000) == []
    assert grown(0, 100_000, 200_000, 300_000)
