"""The waits between an accelerator's streams, tested with simulated streams that only record calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

from minifsdp.cases.hook_streams import on_stream
from minifsdp.engine import collectives, lifetime
from minifsdp.engine.collectives import Scaling
from minifsdp.engine.comm_streams import COMPLETED, CommStream
from minifsdp.engine.exchange import broadcast
from minifsdp.engine.layout import Gradient
from minifsdp.engine.mesh import Group, MeshGroups, default_group
from minifsdp.engine.reduce import ReducePlan, Reducer
from spec_tests.harness import device, ranks
from spec_tests.models import small
from spec_tests.models.modules import chain
from spec_tests.models.stand_in import DEVICE, Kept, StandIn, machine

# Stand-ins replace streams and groups. On an accelerator, the tests in spec_tests/streams use real ones.
pytestmark = pytest.mark.cpu

__all__ = ["machine"]

ANYTHING: Any = None
PAIR = Group(ANYTHING, 2, 0, (0, 1))
F32, BF16 = torch.float32, torch.bfloat16


# --- a backend whose collectives return nothing, and one whose collectives return a Work ---


class Quiet:
    """A group whose collectives complete immediately and return nothing, as NCCL's collectives appear to the caller."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._group, name)
        if name not in ("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base",
                        "allreduce", "broadcast"):  # fmt: skip
            return real
        return lambda *args: real(*args).wait() and None


def quiet_of(kind: type[Group], process_group: Any, device: torch.device | None = None) -> Group:
    group = process_group._group if isinstance(process_group, Quiet) else process_group
    return kind(ANYTHING if group is None else Quiet(group), group.size(), group.rank(), (0, 1))


@pytest.mark.spec("STREAM-01")
@ranks(2)
def test_collectives_without_return_value_can_be_awaited() -> None:
    group, mine = quiet_of(Group, default_group()), torch.ones(2, device=device())
    whole = torch.zeros(4, device=device())
    collectives.all_gather(group, whole, mine).wait()
    assert whole.tolist() == [1.0] * 4
    collectives.reduce_scatter(group, mine, whole).wait()
    collectives.all_reduce(group, mine).wait()
    assert mine.tolist() == [4.0, 4.0]
    broadcast(group, mine)


@pytest.mark.spec("STREAM-01")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_model_trains_and_is_summoned_where_collectives_return_nothing(use_orig_params: bool) -> None:
    expected = small.shard_each(chain(), use_orig_params=use_orig_params)
    small.train_once(expected)
    with mock.patch.object(Group, "of", classmethod(quiet_of)):
        model = small.shard_each(chain(), use_orig_params=use_orig_params)
        small.train_once(model)
        with model.summon_full_params(model, with_grads=use_orig_params):
            found = [parameter.clone() for parameter in model.parameters()]
    with expected.summon_full_params(expected):
        for mine, value in zip(found, expected.parameters(), strict=True):
            assert torch.equal(mine, value)


@pytest.mark.pure
@pytest.mark.spec("STREAM-02")
@pytest.mark.proof("order only")
def test_accelerator_work_is_awaited_on_its_comm_stream_before_the_event(
    machine: StandIn,
) -> None:
    class Work:
        def wait(self) -> None:
            machine.note("Work")

    real = CommStream("gather", DEVICE)
    recorded = real.stream.record_event
    real.stream.record_event = lambda: machine.note("event") or recorded()
    with real as comm_stream:
        handle = comm_stream.handle(Work())
    handle.wait()
    assert machine.log == ["gather: Work", "gather: event", "compute waits for gather"]


@pytest.mark.pure
@pytest.mark.spec("STREAM-07")
@pytest.mark.proof("order only")
def test_every_stream_comes_from_its_device(machine: StandIn) -> None:
    class Memory:
        device = DEVICE
        record_stream, untyped_storage = mock.Mock(), mock.Mock()

    memory: Any = Memory()
    comm_streams = machine.comm_streams()
    comm_streams.all_gather.wait_compute()
    lifetime.release(memory)
    assert machine.log == ["gather waits for compute"]
    assert memory.record_stream.call_args.args[0].name == "compute"


# --- reductions ---


class Noted(Scaling):
    """A division that logs the stream on which it runs."""

    machine: StandIn

    def complete(self, local_shard: Tensor) -> None:
        self.machine.note("divide")


@pytest.fixture
def plan(machine: StandIn, monkeypatch: pytest.MonkeyPatch) -> Callable[[MeshGroups], ReducePlan]:
    """Creates plans whose stages are logged."""

    def noted(what: str) -> Any:
        return lambda *_: machine.note(what) or COMPLETED

    monkeypatch.setattr(collectives, "reduce_scatter", noted("reduce-scatter"))
    monkeypatch.setattr(collectives, "all_reduce", noted("all-reduce"))
    monkeypatch.setattr(Noted, "machine", machine, raising=False)
    return lambda mesh: ReducePlan(mesh, F32, Noted(1.0, 2.0))


def reduce_once(machine: StandIn, plan: ReducePlan, **facts: Any) -> list[str]:
    """Runs one reduction, from its issue to the end of backward. Returns the log."""
    kept = Kept(machine.note)
    vars(kept).update(facts)
    one, target = Reducer(machine.comm_streams(), kept.offloads), cast(Any, kept)
    one.reduce(target, plan, Gradient([torch.ones(4)]))
    one.finish()
    return machine.log


def on_hook(*_: Any) -> None:
    """A hook that does nothing."""


SHARDED, REPLICATED, HYBRID = MeshGroups.sharded(PAIR), MeshGroups.replicated(PAIR), MeshGroups.hybrid(PAIR, PAIR)
SENT = "reduce waits for compute, reduce: reduce-scatter, reduce: divide"
COPIED = f"{SENT}, reduce: copy to the host, compute waits for reduce, CPU waits for an event of reduce"
AT_THE_END = "compute waits for gather, CPU waits for compute"
HOOK, OFFLOAD = {"has_hook": True}, {"offloads": True, "has_gradient": True}
# The requirement, the groups, the layout's properties, and the operations and waits of one reduction.
ORDERS: dict[str, tuple[str, MeshGroups, dict[str, bool], str]] = {
    # The compute stream does not divide.
    "one rank": (
        "STREAM-03", MeshGroups(None, None), {},
        "reduce waits for compute, reduce: divide, compute waits for reduce, compute: accept",
    ),
    "sharded": ("STREAM-09", SHARDED, {}, f"{SENT}, compute waits for reduce, compute: accept"),
    "hybrid": (
        "STREAM-09", HYBRID, {},
        "reduce waits for compute, reduce: reduce-scatter, all_reduce waits for reduce, all_reduce: all-reduce, "
        "all_reduce: divide, compute waits for all_reduce, compute: accept",
    ),
    # The hook of a parameter may run an optimizer, so it runs after earlier all-gathers and before later ones.
    "hook of a parameter": (
        "STREAM-16", SHARDED, HOOK,
        f"{SENT}, compute waits for reduce, compute waits for gather, compute: accept, gather waits for compute",
    ),
    "hook of an offloaded parameter": (
        "STREAM-16", SHARDED, {**OFFLOAD, **HOOK},
        f"{COPIED}, CPU waits for gather, compute: accept, gather waits for compute, {AT_THE_END}",
    ),
    # The CPU waits only for the copy of the gradient that it reads.
    "offloaded gradient that the CPU reads": (
        "STREAM-11", SHARDED, OFFLOAD, f"{COPIED}, compute: accept, {AT_THE_END}",
    ),
}  # fmt: skip


@pytest.mark.pure
@pytest.mark.proof("order only")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(ORDERS[name][0])) for name in ORDERS])
def test_reduction_runs_in_this_order(machine: StandIn, plan: Callable[[MeshGroups], ReducePlan], name: str) -> None:
    _, mesh, facts, order = ORDERS[name]
    assert reduce_once(machine, plan(mesh), **facts) == order.split(", ")


@pytest.mark.pure
@pytest.mark.spec("STREAM-03")
@pytest.mark.proof("order only")
@pytest.mark.parametrize("mesh", [SHARDED, REPLICATED], ids=["sharded", "replicated"])
def test_compute_stream_waits_for_a_communication_hook(
    machine: StandIn, plan: Callable[[MeshGroups], ReducePlan], mesh: MeshGroups
) -> None:
    one = plan(mesh)
    one.hook = on_hook
    log = reduce_once(machine, one)
    assert log == ["reduce waits for compute", "compute waits for reduce", "compute: accept"]


@pytest.mark.pure
@pytest.mark.spec("STREAM-09")
@pytest.mark.proof("order only")
def test_a_hook_with_a_stream_of_its_own_runs_between_the_division_and_the_compute_stream(
    machine: StandIn, plan: Callable[[MeshGroups], ReducePlan]
) -> None:
    one = plan(MeshGroups.sharded(PAIR))
    machine.comm_streams()  # This call uses three stream names; the fourth is for the user's stream.
    one.after_reduction = on_stream(lambda _: machine.note("after"), machine.Stream(device=DEVICE, priority=0))
    machine._names = iter(["gather", "reduce", "all_reduce"])
    log = reduce_once(machine, one)
    assert log[2:] == [
        "reduce: divide",
        "extra waits for reduce",
        "extra: after",
        "reduce waits for extra",
        "compute waits for reduce",
        "compute: accept",
    ]


@pytest.mark.pure
@pytest.mark.spec("STREAM-06")
@pytest.mark.proof("order only")
def test_partial_sum_stays_in_memory_until_the_compute_stream_waits_for_its_all_reduce(
    machine: StandIn, plan: Callable[[MeshGroups], ReducePlan]
) -> None:
    one, reducer, kept = plan(MeshGroups.hybrid(PAIR, PAIR)), Reducer(machine.comm_streams()), Kept(machine.note)
    target: Any = kept
    one.all_reduces = False
    reducer.reduce(target, one, Gradient([torch.ones(4)]))
    reducer.finish()
    assert one.partial is not None
    partial = weakref.ref(one.partial[1].untyped_storage())
    assert "compute: accept" not in machine.log
    one.all_reduces = True
    reducer.reduce(target, one, Gradient([torch.ones(4)]))
    assert one.partial is None
    assert partial() is not None, "the all-reduce stream may still read the memory"
    reducer.finish()
    assert partial() is None


@pytest.mark.pure
@pytest.mark.spec("STREAM-10")
@pytest.mark.proof("order only")
def test_gradients_are_copied_to_the_host_on_the_stream_that_reduced_them_with_one_stop_at_the_end(
    machine: StandIn, plan: Callable[[MeshGroups], ReducePlan]
) -> None:
    reducer, kept = Reducer(machine.comm_streams(), offloads=True), Kept(machine.note)
    kept.offloads = True
    target: Any = kept
    for mesh in (MeshGroups.sharded(PAIR), MeshGroups.hybrid(PAIR, PAIR), MeshGroups(None, None)):
        reducer.reduce(target, plan(mesh), Gradient([torch.ones(4)]))
    assert [line for line in machine.log if "copy" in line] == [
        "reduce: copy to the host",
        "all_reduce: copy to the host",
        "reduce: copy to the host",
    ]
    assert not [line for line in machine.log if line.startswith("CPU")]
    reducer.finish()
    assert [line for line in machine.log if line.startswith("CPU")] == ["CPU waits for compute"]
    # Before the CPU waits for the compute stream, the compute stream waits for all reductions.
    assert machine.log[-6:-3] == ["compute waits for reduce", "compute waits for gather", "CPU waits for compute"]
    # The gradients are set last. So if a backward fails earlier, no `.grad` is a tensor that is still being copied.
    assert machine.log[-3:] == ["compute: accept"] * 3
    assert machine.log.count("compute: accept") == 3
