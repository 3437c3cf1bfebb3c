"""Training steps with fake tensors, in programs of their own, because their default group is a fake one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spec_tests.harness.programs import run_module


@pytest.mark.pure
@pytest.mark.spec("PROG-85")
def test_a_step_with_fake_tensors_runs_and_has_the_sizes_of_torch() -> None:
    root = Path(__file__).parents[2]
    apis = ["fully_shard", "hybrid", "mixed", "flat", "original parameters"]
    printed = []
    for library in ("torch", "minifsdp"):
        done = run_module("spec_tests.modes.fake_step", library, *apis, folder=root, environment=os.environ)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines()[-5:])
    assert len(printed[0]) == 5
    assert printed[0] == printed[1]
