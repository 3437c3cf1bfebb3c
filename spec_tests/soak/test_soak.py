"""The short form of the soak: 150 steps through each door, and leaks that must be found."""

from __future__ import annotations

import pathlib

import pytest

from spec_tests.harness import pool
from spec_tests.soak import job

pytestmark = [pytest.mark.ranks, pytest.mark.cpu]


def run(folder: pathlib.Path, api: str, num_steps: int, num_warm: int, leak: str = "none") -> None:
    told = {"api": api, "strategy": "FULL_SHARD", "num_steps": num_steps, "num_warm": num_warm}
    pool.run(2, job.__name__, job.soak.__name__, {**told, "folder": str(folder), "leak": leak}, 120.0)


@pytest.mark.spec("SOAK-01", "SOAK-02")
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
def test_nothing_grows_while_it_trains_evaluates_saves_and_loads(tmp_path: pathlib.Path, api: str) -> None:
    run(tmp_path, api, num_steps=150, num_warm=50)


@pytest.mark.spec("SOAK-03")
@pytest.mark.parametrize("leak", [leak for leak in job.LEAKS if leak != "none"])
def test_a_leak_of_each_kind_is_found(tmp_path: pathlib.Path, leak: str) -> None:
    with pytest.raises(pool.Failure, match=rf"has grown.*{leak}: "):
        run(tmp_path, "wrapper", num_steps=2 * job.ROUND, num_warm=job.ROUND, leak=leak)
