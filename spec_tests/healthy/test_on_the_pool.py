"""Healthy programs that share the processes of the harness."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from spec_tests.harness import ranks
from spec_tests.healthy.programs import names, ordinary, uneven
from spec_tests.healthy.quiet import says_nothing_wrong

# torch's FSDP, the other implementation, warns about NO_SHARD and `state_dict_type`.
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:FSDP.state_dict_type"),
]


def cases(module: Any, table: str) -> list[Any]:
    """Each program of a module with each API."""
    return [
        pytest.param(module.__name__.rpartition(".")[2], program.__name__, api, id=f"{program.__name__}-{api}")
        for api, programs in getattr(module, table).items()
        for program in programs
    ]


def run(module: str, name: str, api: str) -> None:
    program: Callable[[str], None] = getattr(globals()[module], name)
    with says_nothing_wrong():
        program(api)
        # Ranks wait for each other at the end of a test, like a program that ends normally.
        dist.barrier()


@pytest.mark.spec("HEALTHY-02")
@pytest.mark.parametrize(("module", "name", "api"), cases(uneven, "ON_TWO"))
@ranks(2, timeout=60)
def test_ranks_may_run_different_numbers_of_operations_without_communication(module: str, name: str, api: str) -> None:
    run(module, name, api)


@pytest.mark.spec("HEALTHY-03")
@pytest.mark.parametrize(("module", "name", "api"), cases(uneven, "ON_FOUR"))
@ranks(4, timeout=60)
def test_groups_without_communication_are_not_compared(module: str, name: str, api: str) -> None:
    run(module, name, api)


@pytest.mark.spec("HEALTHY-01")
@pytest.mark.parametrize(("module", "name", "api"), cases(ordinary, "ON_TWO"))
@ranks(2, timeout=60)
def test_ordinary_programs_run_without_errors(module: str, name: str, api: str) -> None:
    run(module, name, api)


@pytest.mark.spec("HEALTHY-01")
@pytest.mark.parametrize(("module", "name", "api"), cases(ordinary, "LONG"))
@ranks(2, timeout=180)
def test_long_programs_run_without_errors(module: str, name: str, api: str) -> None:
    run(module, name, api)


@pytest.mark.spec("HEALTHY-03")
@pytest.mark.parametrize(("module", "name", "api"), cases(ordinary, "ON_FOUR"))
@ranks(4, timeout=60)
def test_groups_of_different_ranks_cause_no_error(module: str, name: str, api: str) -> None:
    run(module, name, api)


@pytest.mark.spec("HEALTHY-04")
@pytest.mark.parametrize(("module", "name", "api"), cases(names, "ON_TWO"))
@ranks(2, timeout=60)
def test_ranks_may_wrap_their_modules_differently(module: str, name: str, api: str) -> None:
    run(module, name, api)


@pytest.mark.spec("HEALTHY-05")
@pytest.mark.parametrize("transport", ["messages", "by size", "collectives"])
@pytest.mark.parametrize(("module", "name", "api"), cases(ordinary, "AHEAD"))
@ranks(2, timeout=20)
def test_all_gather_by_program_does_not_block(module: str, name: str, api: str, transport: str) -> None:
    if transport == "by size":
        os.environ.pop("MINIFSDP_TRANSPORT", None)
    else:
        os.environ["MINIFSDP_TRANSPORT"] = transport
    run(module, name, api)
