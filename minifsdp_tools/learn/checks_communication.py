"""Checks of the exercises about communication: reduction, prefetching and the rate limiter.

A recorder takes the place of the layout, and events that never complete by themselves take the place of the device.
Worked example, a limiter with two units in flight: three reshards and all-gathers must wait for events 0 and 1.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from enum import Enum
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


def _reduced(
    mesh: MeshGroups, gradient: torch.Tensor, right: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[str], list[str]]:
    """The tensor that the layout gets for the gradient of this rank, the collectives, and these with the divisions."""
    results: list[torch.Tensor] = []
    divisors = Scaling.of(mesh.num_ranks, right)

    def before(name: str, group: Group, arguments: Any) -> None:
        if name == "reduce_scatter":
            output, whole, _ = arguments
            expect(
                {
                    "output-dtype": output.dtype is whole.dtype,
                    "output-size": output.numel() * group.size == whole.numel(),
                },
                dtype=output.dtype,
                right=whole.dtype,
                got=output.numel(),
                whole=whole.numel(),
                size=group.size,
            )

    def recorded(method: Any) -> Any:
        def call(tensor: torch.Tensor) -> None:
            calls.append(method.__name__)
            method(tensor)

        return call

    def accept_gradient(gradient: Gradient, local_shard: torch.Tensor) -> None:
        expect({"not-waited": not running}, names=[*running])
        results.append(local_shard)

    def pack(gradient: Gradient, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        expect({"reduce-dtype": dtype is right}, got=dtype, right=right)
        return gradient.parts[0].to(dtype, copy=True)

    layout: Any = SimpleNamespace(
        offloads=False,
        name="block",
        local_parameters=[],
        pack=pack,
        accept_gradient=accept_gradient,
    )
    scaling: Any = SimpleNamespace(
        before=divisors.before,
        after=divisors.after,
        prepare=recorded(divisors.prepare),
        complete=recorded(divisors.complete),
    )
    reducer = Reducer(CommStreams(torch.device("cpu")))
    with recorded_collectives(before) as (calls, running):
        reducer.reduce(layout, ReducePlan(mesh, right, scaling), Gradient([gradient]))
        reducer.finish()
    expect({"not-accepted": len(results) == 1}, number=len(results))
    collectives = [name for name in calls if name not in ("prepare", "complete")]
    return results[0], collectives, calls


def _world() -> Group:
    return Group.of(dist.group.WORLD)  # type: ignore[arg-type]


def shard_of_mean() -> None:
    """FULL_SHARD: one reduce-scatter; each rank gets its shard of the mean."""
    rank = dist.get_rank()
    ones = torch.tensor([2.0, 4.0, 6.0, 8.0])
    own = ones * (1 + 2 * rank)
    got, calls, _ = _reduced(MeshGroups.sharded(_world()), own)
    right = (ones * 2).chunk(2)[rank]
    expect(
        {
            "whole": got.shape == (2,),
            "sum": not torch.equal(got, 2 * right),
            "own": not torch.equal(got, own.chunk(2)[rank]),
            "mean": torch.equal(got, right),
            "traffic": calls == ["reduce_scatter"],
        },
        got=got.tolist(),
        right=right.tolist(),
        rank=rank,
        calls=calls,
    )


def replicas() -> None:
    """NO_SHARD: one all-reduce; the divisor is the number of ranks and not of shards."""
    got, calls, _ = _reduced(
        MeshGroups.replicated(_world()), torch.full((4,), 2.0 + 4 * dist.get_rank())
    )
    expect(
        {
            "no-all-reduce": "all_reduce" in calls,
            "sum-of-replicas": not got.eq(8).all(),
            "replicas": got.tolist() == [4.0] * 4,
        },
        got=got.tolist(),
        calls=calls,
    )
    got, calls, _ = _reduced(MeshGroups(None, None), torch.full((4,), 2.0))
    expect({"one-rank": calls == [] and got.tolist() == [2.0] * 4}, calls=calls)


def replicated_shards() -> None:
    """HYBRID_SHARD: a reduce-scatter, and an all-reduce of the shard. The same two ranks are both groups here."""
    ones = torch.tensor([2.0, 4.0, 6.0, 8.0])
    got, calls, steps = _reduced(
        MeshGroups(_world(), _world()), ones * (1 + 2 * dist.get_rank())
    )
    right = ["prepare", "reduce_scatter", "all_reduce", "complete"]
    expect(
        {
            "both-groups": calls == right[1:3],
            # The sums of the shards are [8, 16] and [24, 32]; their sum is divided by 4.
            "all-reduces-shard": got.tolist() == [8.0, 12.0],
            # In float32, `prepare` does nothing; `half_precision` needs it.
            "order-of-steps": steps in (right, right[1:]),
        },
        calls=calls,
        steps=steps,
        got=got.tolist(),
    )


def half_precision() -> None:
    """float16: the division is split in two, so that the sum does not overflow."""
    got, _, _ = _reduced(
        MeshGroups.sharded(_world()), torch.full((4,), 40000.0), torch.float16
    )
    expect(
        {
            "overflow": got.isfinite().all(),
            "half": torch.equal(got, torch.full((2,), 40000.0).half()),
        },
        got=got.tolist(),
    )


# --- 5: prefetching ---

# Units that only have a name.
_Named = Enum("_Named", "a b c new")


def _recorded(forwards: str) -> Any:
    """A schedule after forwards of units with one-letter names, in this order."""
    schedule = Schedule(BackwardPrefetch.BACKWARD_PRE)
    _run_forward(schedule, forwards)
    return schedule


def _run_forward(schedule: Any, forwards: str) -> None:
    for name in forwards:
        schedule.leave(_Named[name])


def _nexts(schedule: Any, backwards: str) -> list[str | None]:
    found = [schedule.next_backward(_Named[name]) for name in backwards]
    return [unit and unit.name for unit in found]


def reverse_order() -> None:
    """The next unit in backward is the one that left forward before."""
    schedule = _recorded("abc")
    got = _nexts(schedule, "cba")
    expect(
        {
            "nothing": got[0] is not None,
            "wraps": got[2] != "c",
            "first-unit": got[0] != "a",
            "reverse": got == ["b", "a", None],
        },
        got=got,
    )
    expect({"unknown": schedule.next_backward(_Named.new) is None})


def several_calls() -> None:
    """A module that runs twice has two backwards, the last use first."""
    for entry, forwards, backwards, right in (
        ("several", "abab", "baba", ["a", "b", "a", None]),
        ("used-up", "abab", "babaa", ["a", "b", "a", None, None]),
        ("itself", "abbc", "cbb", ["b", "a", "a"]),
        ("three-in-a-row", "abbb", "bbb", ["a", "a", "a"]),
    ):
        got = _nexts(_recorded(forwards), backwards)
        expect({entry: got == right}, got=got)


def each_iteration() -> None:
    """The order is recorded again in each iteration."""
    schedule = _recorded("abc")
    schedule.end_iteration()
    _run_forward(schedule, "ba")
    got = _nexts(schedule, "ab")
    expect({"old-order": got == ["b", None]}, got=got)


# --- 6: the rate limiter ---


def _limited(
    num_released: int, num_in_flight: int = 2, enabled: bool = True
) -> tuple[Any, list[int]]:
    """A limiter after reshards of several units whose work runs, and the numbers of the units it waited for."""
    limiter = RateLimiter(enabled, num_in_flight)
    waited = list[int]()
    for number in range(num_released):
        _release(limiter, number, waited)
    return limiter, waited


def _release(limiter: Any, number: int, waited: list[int]) -> None:
    num_waits = len(waited)
    limiter.released(
        SimpleNamespace(
            query=lambda: number in waited, synchronize=lambda: waited.append(number)
        )
    )
    expect({"released-waits": len(waited) == num_waits}, got=waited[num_waits:])


def waits_for_oldest() -> None:
    """With two units in flight, the CPU waits for the older one before the third all-gather."""
    limiter, waited = _limited(2)
    limiter.throttle("third")
    num_left = len(limiter._events)
    expect(
        {
            "not-waited": waited or num_left != 1,
            "not-stored": waited or num_left,
            "never-waits": waited,
            "newest": waited != [1],
            "oldest": waited == [0],
        },
        got=waited,
    )
    limiter.throttle("fourth")
    expect({"too-soon": waited != [0, 1], "not-removed": waited == [0]})
    _release(limiter, 2, waited)
    limiter.throttle("fifth")
    expect({"sequence": waited == [0, 1]}, got=waited)


def waits_only_if_necessary() -> None:
    """With fewer units in flight, or without the limiter, the CPU does not wait."""
    for entry, number, num_in_flight, enabled in (
        ("too-early", 0, 2, True),
        ("too-early", 1, 2, True),
        ("fixed-number", 2, 3, True),
        ("disabled", 5, 2, False),
    ):
        limiter, waited = _limited(number, num_in_flight, enabled)
        limiter.throttle("next")
        expect({entry: waited == []}, number=number, got=waited)


def never_three_units() -> None:
    """In a step of ten units on a slow device, at most two units have memory, and no wait is unnecessary."""
    limiter, waited = _limited(0)
    for number in range(10):
        limiter.throttle(str(number))
        num_in_flight = number - len(waited) + 1
        expect({"three": num_in_flight <= 2}, number=number, got=num_in_flight)
        _release(limiter, number, waited)
    expect({"number-of-waits": waited == list(range(8))}, got=waited)
