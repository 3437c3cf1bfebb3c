"""Runs each program on both sides: torch still has the error, and minifsdp gives the correct result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests.harness import ranks
from spec_tools.torch_is_wrong import CHECKED, OURS, TORCH, cases, is_said, said_by_torchrun

pytestmark = pytest.mark.cpu

HERE = torch.__version__.partition("+")[0]
CASES = {case.name: case for case in cases()}
CRASHES = [name for name, case in CASES.items() if case.said_by(HERE).startswith("Signal")]


def of(num_ranks: int, *, claimed: bool = False) -> Any:
    """The programs for ``num_ranks``. If claimed, only those with output for this torch that do not crash it."""
    chosen = [
        pytest.param(name, marks=[] if claimed else pytest.mark.spec(*case.rows))
        for name, case in CASES.items()
        if case.num_ranks == num_ranks and not (claimed and (HERE not in CHECKED or name in CRASHES))
    ]
    return pytest.mark.parametrize("name", chosen)


def assert_says(name: str, library: str, expected: str) -> None:
    found = CASES[name].run(library)
    if dist.get_rank() == 0:
        assert is_said(expected, found), found


@of(2, claimed=True)
@ranks(2)
def test_torch_has_the_documented_error(name: str) -> None:
    assert_says(name, TORCH, CASES[name].said_by(HERE))


@of(4, claimed=True)
@ranks(4)
def test_torch_has_the_documented_error_on_four_ranks(name: str) -> None:
    assert_says(name, TORCH, CASES[name].said_by(HERE))


@of(2)
@ranks(2)
def test_minifsdp_gives_the_correct_result(name: str) -> None:
    assert_says(name, OURS, CASES[name].in_minifsdp)


@of(4)
@ranks(4)
def test_minifsdp_gives_the_correct_result_on_four_ranks(name: str) -> None:
    assert_says(name, OURS, CASES[name].in_minifsdp)


# Runs in torchrun, because a crash would also end the ranks of the pool.
@pytest.mark.parametrize("name", CRASHES)
def test_torch_crashes_the_process(name: str) -> None:
    assert said_by_torchrun(CASES[name]) == CASES[name].in_torch
