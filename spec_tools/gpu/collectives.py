"""The three collectives that FSDP uses, called through ``torch.distributed`` without this package.

If they fail, the cause is the driver, NCCL, or the sharing of a GPU by several ranks, not the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.harness import device
from spec_tools.gpu.on_ranks import on_ranks
from spec_tools.gpu.platforms import Platform

__all__ = ["work"]

LIMIT = 90.0
NUM_ELEMENTS = 1 << 18  # of each rank: large enough for NCCL to split it into several parts


def work(platform: Platform, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yields one finding: the device of each rank."""
    devices = on_ranks(platform, num_ranks, send, LIMIT)
    yield {"outcome": "passed", "ranks": num_ranks, "devices": devices, "shared": len(set(devices)) < num_ranks}


def send() -> str:
    """Runs an all-gather, a reduce-scatter and an all-reduce; returns the device of this rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.full((NUM_ELEMENTS,), float(rank), device=device())
    whole = torch.empty(num_ranks * NUM_ELEMENTS, device=device())
    dist.all_gather_into_tensor(whole, mine)
    in_order = torch.arange(num_ranks, device=device(), dtype=torch.float32).repeat_interleave(NUM_ELEMENTS)
    check("all-gather", whole, in_order)
    dist.reduce_scatter_tensor(mine, whole)
    check("reduce-scatter", mine, torch.full_like(mine, float(rank * num_ranks)))
    dist.all_reduce(mine)
    check("all-reduce", mine, torch.full_like(mine, float(num_ranks * sum(range(num_ranks)))))
    return str(device())


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises an error if the tensors differ."""
    if not torch.equal(found, expected):
        where = int((found != expected).nonzero()[0])
        raise AssertionError(
            f"{name} on {dist.get_backend()}: element {where} is {float(found[where])}, not {float(expected[where])}"
        )
