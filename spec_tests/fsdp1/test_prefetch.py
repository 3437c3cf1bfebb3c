"""Prefetching in backward and in forward, and its cost in memory.

A watch on each unit's layer records the blocks in memory in the middle of the unit's forward and backward. The tracer
records the order of the collectives. ``test_timelines.py`` checks the order of whole iterations.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.engine import collectives
from minifsdp.engine.comm_streams import CommStream
from spec_tests.harness import device, ranks
from spec_tests.models.modules import Stack, seeded
from spec_tests.models.running import Watch, Wire, batch, iterate, loss_of, said
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, chunked, flat_gradients, mean_gradients
from spec_tests.subject import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy, trace

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
SETTINGS = (PRE, POST, None)


def computing(**options: Any) -> tuple[FullyShardedDataParallel, Watch]:
    """A model whose units record a ``GRAD`` event in the middle of their backward."""
    plain = seeded()
    watch = Watch(plain)
    watch.in_backward = lambda unit: trace.recorder.begin("GRAD", unit) and None
    return wrapped(plain, **options), watch


def backward_words(model: nn.Module, step: int = 0, **arguments: Any) -> list[str]:
    loss = loss_of(model(batch(step), **arguments))
    with trace.record() as recorder:
        loss.backward()
    return said(recorder.events).split()


# --- the option ---


@pytest.mark.spec("PREF-01")
@ranks(2)
def test_backward_prefetch_accepts_only_its_two_members_or_none() -> None:
    assert [member.name for member in BackwardPrefetch] == ["BACKWARD_PRE", "BACKWARD_POST"]
    assert inspect.signature(FullyShardedDataParallel).parameters["backward_prefetch"].default is PRE
    assert wrapped().backward_prefetch is PRE
    for setting in SETTINGS:
        model = wrapped(backward_prefetch=setting)
        assert {unit.backward_prefetch for unit in FullyShardedDataParallel.fsdp_modules(model)} == {setting}
    for wrong in ("BACKWARD_PRE", 1, True, False, object()):
        with pytest.raises(TypeError, match=r"backward_prefetch should be one of BackwardPrefetch\.BACKWARD_PRE"):
            wrapped(backward_prefetch=wrong)


# --- backward ---


@pytest.mark.spec("PREF-02", "PREF-09")
@ranks(2)
def test_pre_prefetch_all_gathers_before_current_gradients() -> None:
    model, _ = computing(backward_prefetch=PRE)
    words = backward_words(model)
    assert words.index("AG3") < words.index("B3"), "asked for by the root"
    for index in (3, 2, 1):
        gather_of_next = words.index(f"AG{index - 1}")
        assert words.index(f"B{index}") < gather_of_next < words.index(f"GRAD{index}")


@pytest.mark.spec("PREF-04", "PREF-09")
@ranks(2)
def test_post_prefetch_all_gathers_after_reshard_of_current_unit() -> None:
    model, _ = computing(backward_prefetch=POST)
    words = backward_words(model)
    for index in (3, 2, 1):
        gather_of_next = words.index(f"AG{index - 1}")
        assert words.index(f"GRAD{index}") < words.index(f"FREE{index}") < gather_of_next
        assert gather_of_next < words.index(f"RS{index}"), "ahead of the reduction, which nobody waits for yet"
        assert gather_of_next < words.index(f"B{index - 1}")


@pytest.mark.spec("PREF-06", "PREF-09")
@ranks(2)
def test_no_prefetch_all_gathers_at_own_backward() -> None:
    model, _ = computing(backward_prefetch=None)
    words = backward_words(model)
    for index in (3, 2, 1, 0):
        begins = words.index(f"B{index}")
        assert words[begins : begins + 3] == [f"B{index}", f"AG{index}", f"GRAD{index}"]


ALIVE = {
    PRE: {"blocks.3": ["blocks.2", "blocks.3"], "blocks.2": ["blocks.1", "blocks.2"],
          "blocks.1": ["blocks.0", "blocks.1"], "blocks.0": ["blocks.0"]},
    POST: {f"blocks.{index}": [f"blocks.{index}"] for index in range(4)},
    None: {f"blocks.{index}": [f"blocks.{index}"] for index in range(4)},
}  # fmt: skip


@pytest.mark.spec("PREF-03", "PREF-05", "PREF-06")
@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_backward_unshards_expected_number_of_blocks(setting: BackwardPrefetch | None) -> None:
    plain = seeded()
    watch = Watch(plain)
    alive: dict[str, list[str]] = {}

    def look(unit: str) -> None:
        if unit:
            alive[unit] = watch.alive_blocks()

    watch.in_backward = look
    model = wrapped(plain, backward_prefetch=setting)
    for step in range(2):
        alive.clear()
        iterate(model, step)
        assert alive == ALIVE[setting]


@pytest.mark.spec("PREF-03", "PREF-05")
@pytest.mark.parametrize(("setting", "most"), [(PRE, 2), (POST, 1), (None, 1)])
@ranks(2)
def test_backward_never_has_more_blocks_unsharded(setting: BackwardPrefetch | None, most: int) -> None:
    model = wrapped(backward_prefetch=setting)
    loss = loss_of(model(batch()))
    with trace.record() as recorder:
        loss.backward()
    alive, peak = 0, 0
    for event in recorder.events:
        if event.unit:
            alive += {"AG": 1, "FREE": -1}.get(event.kind, 0)
            peak = max(peak, alive)
    assert peak == most


@pytest.mark.accelerator
@pytest.mark.spec("PREF-03", "PREF-05")
@ranks(2)
def test_pre_holds_one_unit_more_than_post_in_memory() -> None:
    block_bytes = 1024 * 1025 * 4
    most = {setting: most_in_backward(setting) for setting in (PRE, POST)}
    # Pre: the parameters of the current block and of the next one. Post: only those of the current block.
    assert most[PRE] > 1.9 * block_bytes
    assert 0.9 * block_bytes < most[PRE] - most[POST] < 1.1 * block_bytes


def most_in_backward(setting: BackwardPrefetch) -> int:
    """Peak bytes that are allocated while a block computes gradients, minus those at the beginning of backward."""
    accelerator = torch.get_device_module(device())
    plain = seeded(lambda: Stack(1024))
    watch = Watch(plain)
    allocated: list[int] = []

    def look(unit: str) -> None:
        if unit:
            # Several streams use the memory. Without this the allocator could not yet free the last unit's memory.
            accelerator.synchronize()
            allocated.append(accelerator.memory_allocated())

    watch.in_backward = look
    model = wrapped(plain, backward_prefetch=setting)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        loss = loss_of(model(batch(width=1024)))
        accelerator.synchronize()
        before = accelerator.memory_allocated()
        allocated.clear()
        loss.backward()
    return max(allocated) - before


@pytest.mark.spec("PREF-07")
@ranks(2)
def test_all_settings_give_the_same_gradients_bit_by_bit() -> None:
    results = []
    for setting in SETTINGS:
        model = wrapped(backward_prefetch=setting)
        for step in range(2):
            iterate(model, step)
        results.append({unit: gradient.clone() for unit, gradient in flat_gradients(model).items()})
    for other in results[1:]:
        assert_same(other, results[0], bitwise=True)
    plain = seeded()
    assert_same(results[0], chunked(plain, mean_gradients(plain, [0, 1]), 2, dist.get_rank()), bitwise=False)


@pytest.mark.spec("PREF-08")
@pytest.mark.parametrize("orders", [[(2, 0, 3, 1)], [(0, 1, 2, 3), (3, 1, 0, 2)], [(1, 2), (3, 0, 2)]])
@ranks(2)
def test_backward_prefetch_follows_the_reverse_forward_order_of_this_iteration(orders: Sequence[Sequence[int]]) -> None:
    model = wrapped()
    for step, order in enumerate(orders):
        words = backward_words(model, step, order=order)
        asked_for = [word for word in words if word.startswith(("AG", "B"))]
        expected = [f"AG{order[-1]}"]
        for position in reversed(range(len(order))):
            expected += [f"B{order[position]}"] + ([f"AG{order[position - 1]}"] if position else [])
        assert asked_for == expected


class Branches(Stack):
    """Block 0 feeds two branches, 1 and 2, whose outputs meet in 3."""

    def forward(self, x: Tensor, order: Any = None) -> Tensor:
        x = self.blocks[0](self.enter(x))
        return self.leave(self.blocks[3](self.blocks[1](x) + self.blocks[2](x)))


@pytest.mark.spec("PREF-08")
@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_branches_are_all_gathered_in_reverse_forward_order(setting: BackwardPrefetch | None) -> None:
    model = wrapped(seeded(Branches), backward_prefetch=setting)
    for step in range(2):
        words = backward_words(model, step)
        assert [word for word in words if word.startswith("AG")] == ["AG3", "AG2", "AG1", "AG0"]
        if setting is PRE:
            assert words.index("B3") < words.index("AG2") < words.index("FREE3")
            assert words.index("B2") < words.index("AG1") < words.index("FREE2")
    plain = seeded(Branches)
    expected = mean_gradients(plain, [0, 1])
    assert_same(flat_gradients(model), chunked(plain, expected, 2, dist.get_rank()), bitwise=False)


@pytest.mark.spec("PREF-15")
@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("strategy", [SHARD_GRAD_OP, NO_SHARD])
@ranks(2)
def test_kept_unit_is_not_all_gathered_in_backward(
    strategy: ShardingStrategy, setting: BackwardPrefetch | None, forward_prefetch: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, backward_prefetch=setting, forward_prefetch=forward_prefetch)
    for step in range(3):
        loss = loss_of(model(batch(step)))
        with trace.record() as recorder, Wire() as wire:
            loss.backward()
        assert recorder.count("AG") == 0
        assert "AG" not in wire.kinds()


# --- communication streams ---


@pytest.mark.spec("PREF-10")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_collectives_run_in_traced_issue_order(strategy: ShardingStrategy, setting: BackwardPrefetch | None) -> None:
    """The blocks have different sizes, so that the number of elements identifies the unit of a collective."""
    model = wrapped(seeded(lambda: Stack(hidden=(2, 4, 6, 8))), sharding_strategy=strategy, backward_prefetch=setting)
    for step in range(2):
        with trace.record() as recorder, Wire() as wire:
            iterate(model, step)
        assert wire.values == [(event.kind, event.num_bytes // 4) for event in recorder.events if event.ranks]


@pytest.mark.accelerator
@pytest.mark.spec("PREF-10", "PREF-14")
@ranks(2)
def test_all_gathers_of_all_units_share_one_stream() -> None:
    plain = seeded()
    model = wrapped(plain)
    iterate(model)
    comm_streams = {unit._unit.comm_streams for unit in FullyShardedDataParallel.fsdp_modules(model)}
    assert len(comm_streams) == 1
    (comm_streams_of_tree,) = comm_streams
    streams = [comm_streams_of_tree.all_gather.stream, comm_streams_of_tree.reduce.stream]
    assert len({*streams, torch.get_device_module(device()).current_stream()}) == 3


@contextmanager
def lanes_of_collectives() -> Iterator[set[tuple[str, str]]]:
    """Records the stream on which each kind of collective is issued while the context is open."""
    found: set[tuple[str, str]] = set()
    inside, enter, leave = ["compute"], CommStream.__enter__, CommStream.__exit__

    def entering(comm_stream: CommStream) -> CommStream:
        inside.append(comm_stream.name)
        return enter(comm_stream)

    def leaving(comm_stream: CommStream, *error: Any) -> None:
        inside.pop()
        leave(comm_stream, *error)

    def issuing(kind: str, issue: Callable[..., Any], *arguments: Any) -> Any:
        found.add((kind, inside[-1]))
        return issue(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommStream, "__enter__", entering)
        patch.setattr(CommStream, "__exit__", leaving)
        for kind in ("all_gather", "reduce_scatter"):
            patch.setattr(collectives, kind, partial(issuing, kind, getattr(collectives, kind)))
        yield found


@pytest.mark.spec("PREF-14")
@ranks(2)
def test_wrapper_issues_collectives_on_labelled_comm_streams() -> None:
    """Checks the actual stream too: a label alone could be right even if everything ran on the compute stream."""
    model = wrapped()
    iterate(model)
    with trace.record() as recorder, lanes_of_collectives() as issued:
        iterate(model)
    comm_streams = {
        kind: {event.stream for event in recorder.events if event.kind == kind} for kind in ("AG", "F", "B", "RS")
    }
    assert comm_streams == {"AG": {"gather"}, "F": {"compute"}, "B": {"compute"}, "RS": {"reduce"}}
    assert issued == {("all_gather", "gather"), ("reduce_scatter", "reduce")}


@pytest.mark.spec("PREF-14")
@ranks(2)
def test_forward_of_unit_waits_for_its_prefetched_all_gather() -> None:
    """A prefetched all-gather runs while another unit computes. There is no other overlap."""
    model = wrapped(forward_prefetch=True)
    iterate(model)
    with trace.record() as recorder:
        iterate(model, 1)
    first = {}
    for event in recorder.events:
        first.setdefault((event.kind, event.unit), event)
    for index in range(3):
        computes, ahead = first["F", f"blocks.{index}"], first["AG", f"blocks.{index + 1}"]
        assert ahead.start < computes.start < computes.end < ahead.end


# --- forward ---


@pytest.mark.spec("PREF-11")
@ranks(2)
def test_unit_is_all_gathered_at_its_own_forward_by_default() -> None:
    assert inspect.signature(FullyShardedDataParallel).parameters["forward_prefetch"].default is False
    model = wrapped()
    assert model.forward_prefetch is False
    for step in range(3):
        with trace.record() as recorder:
            model(batch(step))
        words = said(recorder.events).split()
        for index in range(4):
            forward = words.index(f"F{index}")
            assert words[forward - 1] == f"AG{index}"
            assert index == 0 or words[forward - 2] == f"FREE{index - 1}"


@pytest.mark.spec("PREF-12")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
@ranks(2)
def test_forward_prefetch_follows_the_order_of_the_first_iteration_from_the_second_on(order: Sequence[int]) -> None:
    model = wrapped(forward_prefetch=True)
    for step in range(3):
        with trace.record() as recorder:
            loss = loss_of(model(batch(step), order=order))
        loss.backward()
        words = said(recorder.events).split()
        for current, following in itertools.pairwise(order):
            is_ahead = words.index(f"AG{following}") < words.index(f"F{current}")
            assert is_ahead is (step > 0), "the first iteration only records"
        assert [word for word in words if word.startswith("AG")] == ["AGR", *(f"AG{index}" for index in order)]


@pytest.mark.spec("PREF-13")
@pytest.mark.parametrize("later", [(0, 2, 1, 3), (3, 2, 1, 0), (1, 3), (0, 2)])
@ranks(2)
def test_forward_prefetch_with_another_order_warns_and_stays_correct(later: Sequence[int]) -> None:
    plain = seeded()
    watch = Watch(plain)
    model = wrapped(plain, forward_prefetch=True)
    iterate(model, 0)
    iterate(model, 1)
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"forward_prefetch expects .*order of the first iteration"):
        iterate(model, 2, order=later)
    assert watch.alive() == [], "what was gathered in vain is dropped at the end of backward"
    check_gradients(model, later, 2)
    # Return to the recorded order, after a parameter change that a stale prefetch would not include.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    model.zero_grad()
    iterate(model, 3)
    check_gradients(model, range(4), 3, shifted_by=0.25)


def check_gradients(model: nn.Module, order: Sequence[int], step: int, shifted_by: float = 0.0) -> None:
    """Compares with a single process that runs the blocks in this order. A block that did not run has no gradient."""
    plain = seeded()
    plain.order = order
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(shifted_by)
    assert_same(flat_gradients(model), chunked(plain, mean_gradients(plain, [step]), 2, dist.get_rank()))


@pytest.mark.spec("PREF-12", "PREF-13")
@ranks(2)
def test_forward_prefetch_with_a_constant_order_does_not_warn() -> None:
    model = wrapped(forward_prefetch=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            iterate(model, step)


@pytest.mark.spec("PREF-12")
@ranks(2)
def test_forward_prefetch_changes_no_gradient() -> None:
    results = []
    for forward_prefetch in (False, True):
        model = wrapped(forward_prefetch=forward_prefetch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            iterate(model, step)
            optimizer.step()
        results.append(flat_gradients(model))
    assert_same(*results, bitwise=True)
