"""Sends data between each pair of ranks in both directions, and checks every element. Pairs take turns.

A collective uses many links at once, so it does not show which link is bad. Here one pair is active at a time. A wrong
element fails. A pair that needs much longer than the median pair gets a warning, because times are only known where
each rank has a GPU of its own.

Worked example with three ranks, 16 MiB in each direction::

    pair     ms     GB/s
    0, 1     0.9    18.6
    0, 2     0.9    18.6
    1, 2     9.1     1.8     WARN: 10 times the median of all pairs

Spec: KIT-12.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_tests.harness import device, pool
from spec_tools.gpu.on_ranks import on_ranks
from spec_tools.gpu.platforms import Platform, find

__all__ = ["between_all_pairs", "slow_pairs", "work"]

LIMIT = 90.0
NUM_ELEMENTS = 1 << 22  # 16 MiB
NUM_ROUNDS = 3
SLOW_FACTOR = 3.0  # NVLink and PCIe differ by about 10, two PCIe paths of one machine by less than 2
MOST_PAIRS = 120

Clock = Callable[[], float]


def work(platform: Platform, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yields one finding for each pair."""
    try:
        by_rank = on_ranks(platform, num_ranks, between_all_pairs, LIMIT, name=platform.name)
    except pool.Failure as failure:
        text = f"{failure}\na transfer between two of the {num_ranks} ranks did not end, or raised"
        yield {"outcome": "failed", "ranks": num_ranks, "text": text}
        return
    # Both ranks of a pair have measured it. The slower one counts, and the wrong elements of both.
    measured: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in itertools.chain(*by_rank):
        measured.setdefault((one["pair"][0], one["pair"][1]), []).append(one)
    times = {pair: max(one["ms"] for one in found) for pair, found in measured.items()}
    has_times = num_ranks <= platform.num_devices()
    slow = slow_pairs(times) if has_times else {}
    for pair, found in sorted(measured.items()):
        yield _finding(pair, times[pair] if has_times else None, sum(one["wrong"] for one in found), slow.get(pair))


def _finding(pair: tuple[int, int], ms: float | None, wrong: int, factor: float | None) -> dict[str, Any]:
    name = f"link between ranks {pair[0]} and {pair[1]}"
    finding: dict[str, Any] = {"outcome": "passed", "pair": list(pair), "wrong": wrong}
    if ms is not None:
        finding |= {"ms": round(ms, 3), "GB/s": round(NUM_ELEMENTS * 4 / ms / 1e6, 2)}
    if factor is not None:
        finding["warning"] = f"{name}: {ms:.3g} ms, {factor:.1f} times the median of all pairs"
        finding["lines"] = [f"WARN {finding['warning']}. Remedy: compare with the topology above; check this link"]
    if wrong:
        finding |= {"outcome": "failed", "text": f"{name}: wrong values in {wrong} of {2 * NUM_ELEMENTS} elements"}
    return finding


def slow_pairs(times: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """The pairs that need much longer than the median pair, with the factor. Two pairs cannot be compared."""
    if len(times) < 3:
        return {}
    median = statistics.median(times.values())
    return {pair: ms / median for pair, ms in times.items() if ms > SLOW_FACTOR * median}


# ---- on a rank ------------------------------------------------------------------------------------------------------


def between_all_pairs(
    name: str, clock: Clock = time.perf_counter, corrupt: Callable[[Tensor], object] = lambda received: None
) -> list[dict[str, Any]]:
    """Exchanges data with each other rank; returns the pair, the milliseconds and the number of wrong elements.

    Args:
        name: name of the platform.
        clock: the current time in seconds. Tests pass another one.
        corrupt: is called with each received tensor. Tests pass a function that changes it.
    """
    here = find(name)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    pairs: Sequence[tuple[int, int]] = list(itertools.combinations(range(num_ranks), 2))[:MOST_PAIRS]
    found = []
    for pair in pairs:
        if rank in pair:
            other = pair[1] if rank == pair[0] else pair[0]
            found.append({"pair": list(pair), **_exchange(here, rank, other, clock, corrupt)})
        dist.barrier()
    return found


def _exchange(
    here: Platform, rank: int, other: int, clock: Clock, corrupt: Callable[[Tensor], object]
) -> dict[str, Any]:
    mine, expected = _values(rank), _values(other)
    received = torch.zeros_like(mine)
    times, wrong = [], 0
    for _ in range(1 + NUM_ROUNDS):  # NCCL connects in the first round
        received.zero_()
        here.synchronize()
        begin = clock()
        _both_directions(mine, received, rank, other)
        here.synchronize()
        times.append(clock() - begin)
        corrupt(received)
        wrong += int((received != expected).sum())
    return {"ms": 1000 * min(times[1:]), "wrong": wrong}


def _both_directions(mine: Tensor, received: Tensor, rank: int, other: int) -> None:
    """The lower rank sends first, so that a backend that blocks in a send does not wait for itself."""
    if rank < other:
        dist.send(mine, other)
        dist.recv(received, other)
    else:
        dist.recv(received, other)
        dist.send(mine, other)


def _values(rank: int) -> Tensor:
    """Values that differ from element to element and from rank to rank, and that float32 represents exactly."""
    return (torch.arange(NUM_ELEMENTS, device=device()) * 7 + 13 * rank + 1).remainder(8191).float()
