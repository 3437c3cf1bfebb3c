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
    """Runs the collectives in the default group, in its halves, and in groups of one rank.

    Hybrid sharding communicates in such groups, and both APIs accept a group of one rank.

    Returns:
        The device of this rank.
    """
    num_ranks = dist.get_world_size()
    send_in_groups(num_ranks)
    for size in sorted({1, num_ranks // 2} - {0, num_ranks}):
        if num_ranks % size == 0:
            send_in_groups(size)
    return str(device())


def send_in_groups(size: int) -> None:
    """Runs an all-gather, a reduce-scatter and an all-reduce in the group of ``size`` ranks that this rank is in."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    all_ranks = [range(start, start + size) for start in range(0, num_ranks, size)]
    groups = [dist.group.WORLD] if size == num_ranks else [dist.new_group(ranks) for ranks in all_ranks]
    group, ranks = groups[rank // size], all_ranks[rank // size]
    where = f"between ranks {list(ranks)}"
    mine = torch.full((NUM_ELEMENTS,), float(rank), device=device())
    whole = torch.empty(size * NUM_ELEMENTS, device=device())
    dist.all_gather_into_tensor(whole, mine, group=group)
    in_order = torch.tensor([*ranks], device=device(), dtype=torch.float32).repeat_interleave(NUM_ELEMENTS)
    check(f"all-gather {where}", whole, in_order)
    dist.reduce_scatter_tensor(mine, whole, group=group)
    check(f"reduce-scatter {where}", mine, torch.full_like(mine, float(rank * size)))
    dist.all_reduce(mine, group=group)
    check(f"all-reduce {where}", mine, torch.full_like(mine, float(size * sum(ranks))))


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises an error if the tensors differ."""
    if not torch.equal(found, expected):
        where = int((found != expected).nonzero()[0])
        raise AssertionError(
            f"{name} on {dist.get_backend()}: element {where} is {float(found[where])}, not {float(expected[where])}"
        )
