"""All-gather and reduce-scatter by size: are the values right, and how long do they take?

FSDP uses these two collectives. They are called through ``torch.distributed`` without minifsdp, so the figures describe
the links, NCCL and torch. The names are those of NVIDIA's nccl-tests:

* ``bytes``: of the unsharded tensor, which an all-gather writes and a reduce-scatter reads;
* ``us``: time of a call, the median of `NUM_GROUPS` groups of calls. The host issues a group without waiting. Each
  group counts with the time of its slowest rank;
* ``busbw``: 1e9 bytes per second, times (n-1)/n for n ranks, because a rank already has its own shard. It is the rate
  at which each rank must receive, so it can be compared with the peak of a link.

The option ``--costs`` of ``python -m minifsdp_tools.simulate`` reads `costs` from the report: ``seconds = latency +
bytes / rate``.

*In torch:* there is no such test. nccl-tests is a program in C++ that must be compiled with the installed NCCL.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_tests.harness import device
from spec_tools.gpu.tasks import Finding, device_module, on_ranks

# Their arguments are the tensor that is written and the one that is read.
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all-gather": dist.all_gather_into_tensor,
    "reduce-scatter": dist.reduce_scatter_tensor,
}
# If ranks share a device, no time has a meaning, so large sizes have no use.
SIZES, SHARED_SIZES = [1 << power for power in range(16, 31, 2)], [1 << 16, 1 << 18, 1 << 20]
NUM_CALLS, NUM_GROUPS = 5, 3
LIMIT = 300.0


def work(num_ranks: int, shared: bool, collective: str, size: int) -> Finding:
    """Measures a collective with one size. ``shared``: whether ranks share a device."""
    by_rank = on_ranks(num_ranks, measure, LIMIT, collective=collective, size=size)
    # The slowest rank of each group of calls.
    seconds = statistics.median(max(times) for times in zip(*by_rank, strict=True))
    busbw = size / seconds / 1e9 * (num_ranks - 1) / num_ranks
    row = {"collective": collective, "ranks": num_ranks, "shared": shared, "bytes": size}
    return {"table": [{**row, "us": round(1e6 * seconds, 1), "busbw": round(busbw, 2)}]}


def measure(collective: str, size: int) -> list[float]:
    """On a rank: the seconds of a call in each group of calls. Raises if a value is wrong."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    count = size // torch.bfloat16.itemsize // num_ranks
    # Element i of rank r's shard is r + i % 5. Sums of equal tensors on all ranks are exact up to 256.
    pattern = (torch.arange(count, device=device()) % 5).to(torch.bfloat16)
    whole = torch.cat([pattern + other for other in range(num_ranks)])
    shard = whole.chunk(num_ranks)[rank].clone()
    if collective == "all-gather":
        read, right = shard, whole
    else:
        read, right = whole, num_ranks * shard
    written = torch.empty_like(right)
    COLLECTIVES[collective](written, read)
    num_wrong = int((written != right).sum())
    if num_wrong:
        raise AssertionError(f"{collective} of {size} bytes: {num_wrong} wrong values of {len(right)}")
    times = []
    for _ in range(NUM_GROUPS):
        device_module().synchronize()
        begin = time.perf_counter()
        for _ in range(NUM_CALLS):
            COLLECTIVES[collective](written, read)
        device_module().synchronize()
        times.append((time.perf_counter() - begin) / NUM_CALLS)
    return times


def costs(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """The latency and the rate of each collective and number of ranks.

    The latency is the time of the smallest size in seconds, the rate that of the fastest size in bytes per second.
    """
    rows: dict[tuple[str, int], list[Finding]] = {}
    for one in findings:
        rows.setdefault((one["collective"], one["ranks"]), []).append(one)
    return [
        {
            "collective": collective,
            "ranks": ranks,
            "latency": some[0]["us"] / 1e6,
            "rate": max(row["bytes"] / row["us"] for row in some) * 1e6,
        }
        for (collective, ranks), some in rows.items()
    ]
