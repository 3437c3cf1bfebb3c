"""All-gather and reduce-scatter by size: time, bandwidth, and the number of wrong values.

FSDP uses these two collectives. They are called through ``torch.distributed`` without minifsdp, so the figures describe
the links, NCCL and torch. The sizes are powers of two, and the *units* of known models: a transformer block is
all-gathered as one tensor. The names of the figures are those of NVIDIA's nccl-tests:

* ``bytes``: of the unsharded tensor, which an all-gather writes and a reduce-scatter reads;
* ``count``: elements of the shard of one rank;
* ``algbw``: bytes divided by the time. ``busbw``: that times (n-1)/n for n ranks, because a rank already has its own
  shard. It is the rate at which each rank must receive, so it can be compared with the peak of a link;
* ``wrong``: wrong values on all ranks.

There are two times. For ``us``, the host issues all calls while the stream is still busy with a kernel that only waits,
and events on the stream measure each call. So it does not contain the work of the host. For ``host us``, the host waits
for each call, as a program does that needs the result. Both are the minimum, the median and the maximum over the calls,
and each call counts with the time of its slowest rank. The first call is not counted. On a CPU both are times of the
host.

Values are small integers, so that sums are exact in bfloat16 and do not depend on the order. The pattern has a prime
period, so a piece at a wrong position has wrong values. Buffers are filled again before each check, and all values are
also checked after the measurement.

Worked example, bytes of the buffers for a tensor of 1 GiB on 8 ranks: 1 GiB, a shard of 128 MiB, and one block of
`BLOCK` values. Sizes that do not fit into the free memory of all ranks are skipped, and the row gives the reason.

*In torch:* there is no such test. nccl-tests is a program in C++ that must be compiled with the installed NCCL.

Spec: KIT-16.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_tests.harness import device, pool
from spec_tools.gpu.on_ranks import on_ranks
from spec_tools.gpu.platforms import Platform, find

__all__ = ["COLLECTIVES", "DTYPES", "UNITS", "card", "estimate", "finding_of", "measure", "plan", "work"]

Row = dict[str, Any]

COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all-gather": lambda whole, shard: dist.all_gather_into_tensor(whole, shard),
    "reduce-scatter": lambda whole, shard: dist.reduce_scatter_tensor(shard, whole),
}
DTYPES = ("float32", "bfloat16")
# Elements of a unit. Llama has no biases; its block has attention, a gated perceptron, and two norms.
UNITS = {
    "GPT-2 block": 12 * 768**2 + 13 * 768,
    "GPT-2 embedding": (50257 + 1024) * 768,
    "Llama 7B block": 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096,
}
SMALLEST, QUICK_SIZES = 1 << 16, (1 << 20, 1 << 24, 1 << 28)
BLOCK = 1 << 20  # values that are filled or compared at once
LARGEST_SHARED = 1 << 24  # bytes, if ranks share a device: then no time has a meaning, so a long run has no use
FREE_SHARE = 0.9  # of the free memory; the backend needs some for itself
NUM_CALLS, FEWEST_CALLS, SECONDS_FOR_CALLS = 20, 5, 0.2
SECONDS_TO_START, SECONDS_FOR_A_ROW = 20.0, 0.8


def plan(largest: int, quick: bool, dtype: torch.dtype) -> list[tuple[str, int]]:
    """The sizes of the unsharded tensor: a name, which is empty for a power of two, and the number of elements."""
    powers = [SMALLEST << power for power in range(64) if SMALLEST << power <= largest]
    chosen = [size for size in powers if size in QUICK_SIZES] if quick else powers
    return [("", size // dtype.itemsize) for size in chosen] + list(UNITS.items())


def estimate(largest: int, quick: bool) -> float:
    """Seconds of the chunk for one number of ranks."""
    num_rows = len(COLLECTIVES) * sum(len(plan(largest, quick, getattr(torch, dtype))) for dtype in DTYPES)
    return SECONDS_TO_START + SECONDS_FOR_A_ROW * num_rows


def work(platform: Platform, num_ranks: int, quick: bool, hang_limit: float) -> Iterator[dict[str, Any]]:
    """Yields one finding for each collective and dtype, with a row for each size."""
    try:
        cards = on_ranks(platform, num_ranks, card, hang_limit, name=platform.name)
        most = max(Counter(identity for _, identity in cards).values())
        same = {"ranks": num_ranks, "card": ", ".join(sorted({name for name, _ in cards})), "shared": most > 1}
        largest = min(platform.largest, LARGEST_SHARED) if most > 1 else platform.largest
        arguments = {"name": platform.name, "largest": largest, "ranks_on_a_device": most}
        for collective, dtype in itertools.product(COLLECTIVES, DTYPES):
            sizes = plan(largest, quick, getattr(torch, dtype))
            arguments |= {"collective": collective, "dtype": dtype, "sizes": sizes}
            by_rank = on_ranks(platform, num_ranks, measure, hang_limit, **arguments)
            yield finding_of({**same, "collective": collective, "dtype": dtype}, by_rank)
    except pool.Failure as failure:
        # After a hang, the other collectives would only hang too.
        yield {"ranks": num_ranks, "outcome": "failed", "text": f"{num_ranks} ranks:\n{failure}"}


def finding_of(about: dict[str, Any], by_rank: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """The finding about a collective and a dtype, from the rows of each rank."""
    rows = [_joined(rows) for rows in zip(*by_rank, strict=True)]
    wrong = [row for row in rows if row.get("wrong")]
    if not wrong:
        return {**about, "outcome": "passed", "rows": rows}
    title = f"{about['collective']} of {about['dtype']} on {about['ranks']} ranks"
    lines = [f"{title}: {row['wrong']} wrong values of {row['bytes']} bytes" for row in wrong]
    return {**about, "outcome": "failed", "rows": rows, "text": "\n".join(lines)}


def _joined(of_ranks: Sequence[Row]) -> Row:
    """One row from those of all ranks."""
    row = {name: of_ranks[0][name] for name in ("what", "bytes", "count", "memory")}
    if "skipped" in of_ranks[0]:
        return {**row, "skipped": of_ranks[0]["skipped"]}
    for figure in ("us", "host us"):
        slowest = sorted(max(times) for times in zip(*(one[figure] for one in of_ranks), strict=True))
        row[figure] = [round(value, 1) for value in (slowest[0], statistics.median(slowest), slowest[-1])]
    num_ranks = len(of_ranks)
    algbw = row["bytes"] / max(row["us"][1], 0.1) / 1000
    row |= {"algbw": round(algbw, 2), "busbw": round(algbw * (num_ranks - 1) / num_ranks, 2)}
    return {**row, "wrong": sum(one["wrong"] for one in of_ranks)}


# ---- on a rank ------------------------------------------------------------------------------------------------------


def card(name: str) -> tuple[str, str]:
    """The name and the identity of this rank's device."""
    return find(name).card()


def measure(
    name: str, collective: str, dtype: str, sizes: Sequence[tuple[str, int]], largest: int, ranks_on_a_device: int
) -> list[Row]:
    """The rows of this rank. Every rank must call it.

    Args:
        name: the platform.
        collective: a key of `COLLECTIVES`.
        dtype: an element of `DTYPES`.
        sizes: from `plan`.
        largest: bytes; larger sizes are skipped.
        ranks_on_a_device: the number of ranks that share the free memory.
    """
    platform = find(name)
    rows = []
    for what, elements in sizes:
        row = _size(what, elements, getattr(torch, dtype))
        if row["bytes"] > largest:
            rows.append({**row, "skipped": f"larger than {_mib(largest)}, the limit here"})
        else:
            rows.append(row | _figures(platform, collective, getattr(torch, dtype), row, ranks_on_a_device))
    return rows


def _size(what: str, elements: int, dtype: torch.dtype) -> Row:
    """The first columns of a row. The shards of all ranks have the same size, so the last one may have padding."""
    num_ranks = dist.get_world_size()
    count = -(-elements // num_ranks)
    memory = (count * num_ranks + count + 2 * BLOCK) * dtype.itemsize
    return {"what": what, "bytes": count * num_ranks * dtype.itemsize, "count": count, "memory": memory}


def _figures(platform: Platform, collective: str, dtype: torch.dtype, row: Row, sharing: int) -> Row:
    """The times and the number of wrong values, or why there are none."""
    platform.empty_cache()
    free = int(platform.free_memory() * FREE_SHARE) // sharing
    buffers = _buffers(row["count"], dtype) if row["memory"] <= free else None
    if _smallest(float(buffers is not None)) == 0.0 or buffers is None:
        least = _mib(int(_smallest(free)))
        return {"skipped": f"needs {_mib(row['memory'])} on each rank, and only {least} are free"}
    whole, shard = buffers

    def call() -> None:
        COLLECTIVES[collective](whole, shard)

    checker = _Checker(collective, whole, shard)
    wrong = sum(checker.num_wrong(call, turn) for turn in range(2))
    times = _times(platform, call)
    return {**times, "wrong": wrong + checker.num_wrong_now()}


def _buffers(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """The unsharded tensor and the shard, or None if there is no memory for them."""
    try:
        whole = torch.empty(count * dist.get_world_size(), dtype=dtype, device=device())
        return whole, torch.empty(count, dtype=dtype, device=device())
    except torch.OutOfMemoryError:
        return None


def _smallest(value: float) -> float:
    """The smallest value of all ranks, rounded to float32."""
    found = torch.tensor([value], device=device())
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return float(found)


def _times(platform: Platform, call: Callable[[], None]) -> dict[str, list[float]]:
    """Microseconds of each call: on the stream, and with the wait of the host. All ranks make the same calls."""
    platform.synchronize()
    begin = time.perf_counter()
    call()
    platform.synchronize()
    rate = _smallest(1 / (time.perf_counter() - begin))
    number = max(FEWEST_CALLS, min(NUM_CALLS, int(SECONDS_FOR_CALLS * rate)))
    waited, issued = [], []
    for _ in range(number + 1):
        begin = time.perf_counter()
        call()
        issued.append(time.perf_counter() - begin)
        platform.synchronize()
        waited.append(time.perf_counter() - begin)
    # Twice the time in which the host issues all calls, because the clock of a GPU varies.
    platform.sleep(2 + 2000 * (number + 1) * statistics.median(issued))
    marks = [platform.mark()]
    for _ in range(number + 1):
        call()
        marks.append(platform.mark())
    platform.synchronize()
    seconds = [platform.seconds_between(earlier, later) for earlier, later in itertools.pairwise(marks)]
    return {"us": [1e6 * one for one in seconds[1:]], "host us": [1e6 * one for one in waited[1:]]}


class _Checker:
    """Fills the buffers of one collective, and counts wrong values."""

    def __init__(self, collective: str, whole: Tensor, shard: Tensor) -> None:
        self.is_gather = collective == "all-gather"
        self.source, self.target = (shard, whole) if self.is_gather else (whole, shard)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.period = period(self.num_ranks)
        self.turn = 0

    def num_wrong(self, call: Callable[[], None], turn: int) -> int:
        """Fills the buffers with the values of this turn, calls the collective, and counts wrong values."""
        self.turn = turn
        _fill(self.source, self._values([self.rank]))
        self.target.fill_(-1)
        call()
        return self.num_wrong_now()

    def num_wrong_now(self) -> int:
        """The number of wrong values in the target."""
        if self.is_gather:
            parts = self.target.chunk(self.num_ranks)
            return sum(_num_different(part, self._values([rank])) for rank, part in enumerate(parts))
        offset = self.rank * len(self.target)
        return _num_different(self.target, self._values([rank + offset for rank in range(self.num_ranks)]))

    def _values(self, shifts: Sequence[int]) -> Tensor:
        """One period of the sum of the patterns with these shifts."""
        one = [sum((i + shift + self.turn) % self.period for shift in shifts) for i in range(self.period)]
        return torch.tensor(one, dtype=self.target.dtype).to(self.target.device)


def period(num_ranks: int) -> int:
    """The period of the pattern: sums of its values over the ranks are at most 256, so exact in bfloat16."""
    return max((prime for prime in (2, 3, 5, 7) if num_ranks * (prime - 1) <= 256), default=2)


def _fill(tensor: Tensor, values: Tensor) -> None:
    for piece, expected in _pieces(tensor, values):
        piece.copy_(expected)


def _num_different(tensor: Tensor, values: Tensor) -> int:
    return sum(int((piece != expected).sum()) for piece, expected in _pieces(tensor, values))


def _pieces(tensor: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensor in blocks, each with the repeated values."""
    length = min(BLOCK, len(tensor))
    block = values.repeat(-(-length // len(values)))
    for piece in tensor.split(len(block)):
        yield piece, block[: len(piece)]


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
