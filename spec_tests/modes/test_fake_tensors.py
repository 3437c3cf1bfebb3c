"""Training steps with fake tensors, in programs of their own, because their default group is a fake one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spec_tests.harness.programs import run_module


@pytest.mark.pure
@pytest.mark.spec("PROG-85")
@pytest.mark.parametrize("api", ["fully_shard", "hybrid", "mixed", "flat", "original parameters"])
def test_a_step_with_fake_tensors_runs_and_has_the_sizes_of_torch(api: str) -> None:
    root = Path(__file__).parents[2]
    printed = []
    for library in ("torch", "minifsdp"):
        done = run_module("spec_tests.modes.fake_step", api, library, folder=root, environment=os.environ)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split()[-1])
    assert printed[0] == printed[1]
