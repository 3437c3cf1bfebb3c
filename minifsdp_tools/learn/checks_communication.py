"""Checks of the exercises about communication: reduction, prefetching and the rate limiter.

A recorder takes the place of the layout, and events that never complete by themselves take the place of the device.
Worked example, a limiter with two units in flight: three reshards and all-gathers must wait for events 0 and 1.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.engine.collectives import Scaling
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.layout import Gradient
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.reduce import ReducePlan, Reducer
from minifsdp.engine.schedule import BackwardPrefetch, Schedule
from minifsdp_tools.learn.checking import expect, recorded_collectives

# --- 4: reduce-scatter and divide ---


@dataclass(frozen=True)
class _RecordedScaling(Scaling):
    """Divisors that append the names of both divisions to `calls`."""

    calls: list[str]

    def prepare(self, whole: torch.Tensor) -> None:
        self.calls.append("prepare")
        super().prepare(whole)

    def complete(self, local_shard: torch.Tensor) -> None:
        self.calls.append("complete")
        super().complete(local_shard)


def _reduced(
    mesh: MeshGroups, gradient: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Any, list[str], list[str]]:
    """The tensor that the layout gets for the gradient of this rank, the collectives, and these with the divisions."""
    results: list[torch.Tensor] = []
    dtypes: list[torch.dtype] = []
    running: dict[str, Any] = {}
    divisors = Scaling.of(mesh.num_ranks, dtype)

    def before(name: str, arguments: dict[str, Any]) -> None:
        if name == "reduce_scatter" and isinstance(arguments["whole"], torch.Tensor):
            output = arguments["local_shard"]
            whole = arguments["whole"]
            size = arguments["group"].size
            expect(
                output.dtype is whole.dtype,
                "output-dtype",
                got=output.dtype,
                right=whole.dtype,
            )
            fits = output.numel() * size == whole.numel()
            expect(
                fits, "output-size", got=output.numel(), whole=whole.numel(), size=size
            )

    def accept_gradient(gradient: Gradient, local_shard: torch.Tensor) -> None:
        expect(not running, "not-waited", names=[*running])
        results.append(local_shard)

    def pack(
        gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False
    ) -> torch.Tensor:
        dtypes.append(dtype)
        return gradient.parts[0].to(dtype, copy=True)

    layout: Any = SimpleNamespace(
        offloads=False,
        name="block",
        local_parameters=[],
        pack=pack,
        accept_gradient=accept_gradient,
    )
    reducer = Reducer(CommStreams(torch.device("cpu")))
    with recorded_collectives(running, before) as calls:
        scaling = _RecordedScaling(divisors.before, divisors.after, calls)
        reducer.reduce(layout, ReducePlan(mesh, dtype, scaling), Gradient([gradient]))
        reducer.finish()
    expect(len(results) == 1, "not-accepted", number=len(results))
    expect(dtypes == [dtype], "reduce-dtype", got=dtypes, right=dtype)
    return (
        results[0],
        [name for name in calls if name not in ("prepare", "complete")],
        calls,
    )


def _world() -> Group:
    return Group.of(dist.group.WORLD)  # type: ignore[arg-type]


def shard_of_mean() -> None:
    """FULL_SHARD: one reduce-scatter; each rank gets its shard of the mean."""
    rank = dist.get_rank()
    ones = torch.tensor([2.0, 4.0, 6.0, 8.0])
    got, calls, _ = _reduced(MeshGroups.sharded(_world()), ones * (1 + 2 * rank))
    mean = (ones * 2).chunk(2)
    here = {"got": got.tolist(), "right": mean[rank].tolist(), "rank": rank}
    expect(got.shape == (2,), "whole", **here)
    expect(not torch.equal(got, 2 * mean[rank]), "sum", **here)
    expect(not torch.equal(got, (ones * (1 + 2 * rank)).chunk(2)[rank]), "own", **here)
    expect(torch.equal(got, mean[rank]), "mean", **here)
    expect(calls == ["reduce_scatter"], "traffic", calls=calls)


def replicas() -> None:
    """NO_SHARD: one all-reduce; the divisor is the number of ranks and not of shards."""
    got, calls, _ = _reduced(
        MeshGroups.replicated(_world()), torch.full((4,), 2.0 + 4 * dist.get_rank())
    )
    expect("all_reduce" in calls, "no-all-reduce", calls=calls)
    expect(not got.eq(8).all(), "sum-of-replicas")
    expect(got.tolist() == [4.0] * 4, "replicas", got=got.tolist())
    got, calls, _ = _reduced(MeshGroups(None, None), torch.full((4,), 2.0))
    expect(calls == [] and got.tolist() == [2.0] * 4, "one-rank", calls=calls)


def replicated_shards() -> None:
    """HYBRID_SHARD: a reduce-scatter, and an all-reduce of the shard. The same two ranks are both groups here."""
    ones = torch.tensor([2.0, 4.0, 6.0, 8.0])
    got, calls, steps = _reduced(
        MeshGroups(_world(), _world()), ones * (1 + 2 * dist.get_rank())
    )
    right = ["prepare", "reduce_scatter", "all_reduce", "complete"]
    expect(calls == right[1:3], "both-groups", calls=calls)
    # The sums of the shards are [8, 16] and [24, 32]; their sum is divided by 4.
    expect(got.tolist() == [8.0, 12.0], "all-reduces-shard", got=got.tolist())
    # In float32, `prepare` does nothing; `half_precision` needs it.
    expect(steps in (right, right[1:]), "order-of-steps", calls=steps)


def half_precision() -> None:
    """float16: the division is split in two, so that the sum does not overflow."""
    got, _, _ = _reduced(
        MeshGroups.sharded(_world()), torch.full((4,), 40000.0), torch.float16
    )
    expect(got.isfinite().all(), "overflow", got=got.tolist())
    expect(torch.equal(got, torch.full((2,), 40000.0).half()), "half", got=got.tolist())


# --- 5: prefetching ---


def _recorded(forwards: str) -> tuple[Any, dict[str, Any]]:
    """A schedule after forwards of units with one-letter names, in this order, and the units."""
    schedule = Schedule(BackwardPrefetch.BACKWARD_PRE)
    units = {name: _Named(name) for name in forwards}
    _run_forward(schedule, units, forwards)
    return schedule, units


def _run_forward(schedule: Any, units: dict[str, Any], forwards: str) -> None:
    for name in forwards:
        schedule.leave(units[name])


class _Named:
    """A unit with a name only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"unit {self.name}"


def _nexts(schedule: Any, units: dict[str, Any], backwards: str) -> list[str | None]:
    found = [schedule.next_backward(units[name]) for name in backwards]
    return [None if unit is None else unit.name for unit in found]


def reverse_order() -> None:
    """The next unit in backward is the one that left forward before."""
    schedule, units = _recorded("abc")
    got = _nexts(schedule, units, "cba")
    expect(got[0] is not None, "nothing")
    expect(got[2] != "c", "wraps")
    expect(got[0] != "a", "first-unit")
    expect(got == ["b", "a", None], "reverse", got=got)
    expect(schedule.next_backward(_Named("new")) is None, "unknown")


def several_calls() -> None:
    """A module that runs twice has two backwards, the last use first."""
    schedule, units = _recorded("abab")
    got = _nexts(schedule, units, "baba")
    expect(got == ["a", "b", "a", None], "several", got=got)
    expect(_nexts(schedule, units, "a") == [None], "used-up")
    schedule, units = _recorded("abbc")
    got = _nexts(schedule, units, "cbb")
    expect("b" not in got[1:], "itself", got=got)
    expect(got == ["b", "a", "a"], "in-a-row", got=got)
    schedule, units = _recorded("abbb")
    got = _nexts(schedule, units, "bbb")
    expect(got == ["a", "a", "a"], "three-in-a-row", got=got)


def each_iteration() -> None:
    """The order is recorded again in each iteration."""
    schedule, units = _recorded("abc")
    schedule.end_iteration()
    _run_forward(schedule, units, "ba")
    got = _nexts(schedule, units, "ab")
    expect(got == ["b", None], "old-order", got=got)


# --- 6: the rate limiter ---


def _limited(
    num_released: int, num_in_flight: int = 2, enabled: bool = True
) -> tuple[Any, list[int]]:
    """A limiter after reshards of several units whose work runs, and the numbers of the units it waited for."""
    limiter = RateLimiter(enabled, num_in_flight)
    waited = list[int]()
    for number in range(num_released):
        limiter.released(_event(number, waited))
    expect(waited == [], "released-waits", got=waited)
    return limiter, waited


def _event(number: int, waited: list[int]) -> Any:
    return SimpleNamespace(
        query=lambda: number in waited, synchronize=lambda: waited.append(number)
    )


def waits_for_oldest() -> None:
    """With two units in flight, the CPU waits for the older one before the third all-gather."""
    limiter, waited = _limited(2)
    limiter.throttle("third")
    num_left = len(limiter._events)
    expect(waited or num_left != 1, "not-waited")
    expect(waited or num_left, "not-stored")
    expect(waited, "never-waits")
    expect(waited != [1], "newest")
    expect(waited == [0], "oldest", got=waited)
    limiter.throttle("fourth")
    expect(waited != [0, 1], "too-soon")
    expect(waited == [0], "not-removed")
    limiter.released(_event(2, waited))
    limiter.throttle("fifth")
    expect(waited == [0, 1], "sequence", got=waited)


def waits_only_if_necessary() -> None:
    """With fewer units in flight, or without the limiter, the CPU does not wait."""
    for number in (0, 1):
        limiter, waited = _limited(number)
        limiter.throttle("next")
        expect(waited == [], "too-early", number=number)
    limiter, waited = _limited(2, num_in_flight=3)
    limiter.throttle("next")
    expect(waited == [], "fixed-number", got=waited)
    limiter, waited = _limited(5, enabled=False)
    limiter.throttle("next")
    expect(waited == [], "disabled")


def never_three_units() -> None:
    """In a step of ten units on a slow device, at most two units have memory, and no wait is unnecessary."""
    limiter, waited = _limited(0)
    for number in range(10):
        limiter.throttle(str(number))
        num_in_flight = number - len(waited) + 1
        expect(num_in_flight <= 2, "three", number=number, got=num_in_flight)
        num_waits = len(waited)
        limiter.released(_event(number, waited))
        expect(len(waited) == num_waits, "released-waits", got=waited[num_waits:])
    expect(waited == list(range(8)), "number-of-waits", got=waited)
