"""The short form of the soak: 150 steps with each API, and inserted leaks that must be found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spec_tests.harness import pool
from spec_tools.processes import soak

pytestmark = [pytest.mark.ranks, pytest.mark.cpu]


def run(folder: Path, **arguments: Any) -> None:
    pool.run(2, soak.__name__, soak.soak.__name__, {**arguments, "folder": str(folder)}, 120.0)


@pytest.mark.spec("SOAK-01", "SOAK-02")
@pytest.mark.parametrize("api", soak.APIS)
def test_nothing_grows_during_training_evaluation_save_and_load(tmp_path: Path, api: str) -> None:
    run(tmp_path, api=api, num_steps=150, num_warm=50)
    assert (tmp_path / "samples.json").exists()


@pytest.mark.spec("SOAK-03")
@pytest.mark.parametrize("leak", soak.LEAKS)
def test_a_leak_of_each_kind_is_found(tmp_path: Path, leak: str) -> None:
    with pytest.raises(pool.Failure, match=rf"has grown.*{leak}: "):
        run(tmp_path, api="wrapper", num_steps=75, num_warm=25, leak=leak)


@pytest.mark.spec("SOAK-03")
def test_a_table_that_doubles_once_is_not_a_leak() -> None:
    def grown(*sizes: int) -> list[str]:
        return soak.grown([{"step": 1, "python_bytes": size, "kinds": {}} for size in sizes])

    assert grown(0, 10_000, 170_000, 175_000) == []
    assert grown(0, 100_000, 200_000, 300_000)
