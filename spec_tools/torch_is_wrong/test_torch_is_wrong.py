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


def of(num_ranks: int) -> Any:
    """The programs for ``num_ranks`` with minifsdp; and with torch, if this version of torch was run before."""
    chosen = []
    for name, case in CASES.items():
        if case.num_ranks == num_ranks:
            rows = pytest.mark.spec(*case.rows)
            chosen.append(pytest.param(name, OURS, case.in_minifsdp, marks=rows, id=f"{name}-minifsdp"))
            if HERE in CHECKED and name not in CRASHES:
                chosen.append(pytest.param(name, TORCH, case.said_by(HERE), id=f"{name}-torch"))
    return pytest.mark.parametrize(("name", "library", "expected"), chosen)


def assert_says(name: str, library: str, expected: str) -> None:
    found = CASES[name].run(library)
    if dist.get_rank() == 0:
        assert is_said(expected, found), found


@of(2)
@ranks(2)
def test_torch_has_the_documented_error_and_minifsdp_gives_the_correct_result(
    name: str, library: str, expected: str
) -> None:
    assert_says(name, library, expected)


@of(4)
@ranks(4)
def test_both_say_what_is_documented_on_four_ranks(name: str, library: str, expected: str) -> None:
    assert_says(name, library, expected)


# Runs in torchrun, because a crash would also end the ranks of the pool.
@pytest.mark.parametrize("name", CRASHES)
def test_torch_crashes_the_process(name: str) -> None:
    assert said_by_torchrun(CASES[name]) == CASES[name].in_torch
