"""Checks overlaps, stops of the CPU, and memory, using the log of a training step.

On a CPU, the tests of these requirements can only check the order of events. These tests check whether the streams
allow two operations to run at the same time. They do not check whether a machine really does so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp.engine import lifetime
from spec_tests import subject
from spec_tests.harness import device, rank_among_fake_ranks, ranks, simulated
from spec_tests.streams import blocks
from spec_tests.subject import BackwardPrefetch

APIS: dict[str, Callable[..., Any]] = {"wrapper": blocks.flat, "function": blocks.per_parameter}
either_api = pytest.mark.parametrize("api", APIS)


def offloaded(api: str, num_blocks: int = 4) -> Any:
    if api == "wrapper":
        return blocks.flat(num_blocks, cpu_offload=subject.CPUOffload(offload_params=True), limit_all_gathers=False)
    return blocks.per_parameter(num_blocks, offload_policy=subject.CPUOffloadPolicy())


def backward_of(log: blocks.Log, block: int) -> list[Any]:
    """The matrix products of a block's backward; the first block has only one, because its input needs no gradient."""
    of_backward = log.products[4:]
    return of_backward[6:] if block == 0 else of_backward[2 * (3 - block) : 2 * (4 - block)]


class NotYet:
    """The event of a resharded unit whose memory the device is still reading."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        simulated.WORLD.host_stops("a freed unit")


# ---- overlap ----


@pytest.mark.spec("PREF-14", "FS2-PREF-01", "COST-03")
@either_api
@rank_among_fake_ranks(2)
def test_next_all_gather_may_overlap_forward_of_block(api: str) -> None:
    options = {"limit_all_gathers": False} if api == "wrapper" else {}
    log = blocks.logged(APIS[api](**options))
    for block in range(3):
        assert log.order.may_overlap(log.gathers[block + 1], log.products[block])
        assert log.gathers[block].is_before(log.products[block]), "the unit waits for its own all-gather"


@pytest.mark.spec("PREF-09")
@rank_among_fake_ranks(2)
def test_pre_prefetch_all_gather_may_overlap_gradients() -> None:
    log = blocks.logged(blocks.flat(backward_prefetch=BackwardPrefetch.BACKWARD_PRE))
    for step, block in enumerate((3, 2, 1)):
        next_gather = log.gathers[5 + step]
        for product in backward_of(log, block):
            assert log.order.may_overlap(next_gather, product)
            assert log.operations.index(next_gather) < log.operations.index(product)


@pytest.mark.spec("PREF-09")
@rank_among_fake_ranks(2)
def test_post_prefetch_reduction_may_overlap_next_gradients() -> None:
    log = blocks.logged(blocks.flat(backward_prefetch=BackwardPrefetch.BACKWARD_POST))
    for step, block in enumerate((3, 2, 1)):
        assert log.operations.index(log.gathers[5 + step]) > log.operations.index(backward_of(log, block)[-1])
        assert log.operations.index(log.gathers[5 + step]) < log.operations.index(log.scatters[step])
        for product in backward_of(log, block - 1):
            assert log.order.may_overlap(log.scatters[step], product)


@pytest.mark.spec("PREF-09")
@rank_among_fake_ranks(2)
def test_all_gather_without_prefetch_follows_reduction() -> None:
    log = blocks.logged(blocks.flat(backward_prefetch=None))
    for step in range(3):
        # Collectives of one group run in launch order, so the all-gather that B waits for comes after this reduction.
        assert log.operations.index(log.gathers[5 + step]) > log.operations.index(log.scatters[step])


@pytest.mark.spec("PREF-10")
@either_api
@rank_among_fake_ranks(2)
def test_all_gathers_and_reductions_use_separate_streams(api: str) -> None:
    log = blocks.logged(APIS[api]())
    (gather_stream,) = {o.stream for o in log.gathers}
    (reduce_stream,) = {o.stream for o in log.scatters}
    assert len({gather_stream, reduce_stream, simulated.WORLD.main[0].number}) == 3
    assert {o.stream for o in log.products} == {simulated.WORLD.main[0].number}


@pytest.mark.spec("STREAM-09")
@either_api
@rank_among_fake_ranks(2)
def test_the_compute_stream_divides_nothing_and_reduces_nothing(api: str) -> None:
    log = blocks.logged(APIS[api]())
    assert len([o for o in log.operations if o.name == "div_"]) == 4
    assert not [name for name in log.on("compute stream") if name.startswith(("div", "reduce"))]


@pytest.mark.spec("STREAM-17", "FS2-PREF-03")
@pytest.mark.parametrize("prefetches", [False, True])
@rank_among_fake_ranks(2)
def test_each_all_gather_is_copied_out_before_the_next(prefetches: bool) -> None:
    """Otherwise the buffer of the next all-gather is allocated before the own buffer is freed."""
    model = blocks.per_parameter()
    if prefetches:
        for block, following in itertools.pairwise(model):
            block.set_modules_to_forward_prefetch([following])
    log = blocks.logged(model)
    kinds = {"all_gather": "gather", "split_with": "copy"}
    found = [kinds[o.name[:10]] for o in log.operations if o.name[:10] in kinds]
    assert found == ["gather", "copy"] * len(log.gathers)


@pytest.mark.spec("STREAM-09", "HYB-04")
@rank_among_fake_ranks(4)
def test_replica_all_reduce_may_overlap_next_reduce_scatter() -> None:
    log = blocks.logged(blocks.per_parameter(shape=(2, 2)))
    (stream,) = {o.stream for o in log.reductions}
    assert stream not in {o.stream for o in (*log.gathers, *log.scatters)}
    for step in range(3):
        assert log.scatters[step].is_before(log.reductions[step])
        assert log.order.may_overlap(log.reductions[step], log.scatters[step + 1])


@pytest.mark.spec("NEW-12")
@pytest.mark.parametrize("given", [True, False], ids=["event", "no event"])
@rank_among_fake_ranks(2)
def test_first_all_gather_waits_only_for_given_event(given: bool) -> None:
    sharded = blocks.per_parameter()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    x, other = torch.randn(3, 8, device=device()), torch.zeros(8, device=device())
    sharded(x).sum().backward()
    with simulated.Log() as log:
        optimizer.step()
        if given:
            sharded.set_post_optim_event(torch.get_device_module(device()).current_stream().record_event())
        # Other work, for example of a data loader, that no all-gather needs to wait for.
        other.cos_()
        sharded(x)
    names = blocks.Log(log.operations)
    (later,) = [o for o in log.operations if o.name == "cos_"]
    updates = [o for o in log.operations if "add" in o.name and o.stream == simulated.WORLD.main[0].number]
    assert updates[-1].is_before(names.gathers[0]), "new weights are gathered"
    assert names.order.may_overlap(names.gathers[0], later) is given


@pytest.mark.spec("NEW-17")
@pytest.mark.parametrize("shared", [True, False])
@rank_among_fake_ranks(2)
def test_roots_that_share_their_communication_context_share_its_streams(shared: bool) -> None:
    first, second = blocks.per_parameter(), blocks.per_parameter()
    if shared:
        subject.share_comm_ctx([first, second])
    x = torch.randn(3, 8, device=device())
    second(first(x)).sum().backward()
    with simulated.Log() as log:
        second(first(x)).sum().backward()
    names = blocks.Log(log.operations)
    assert len({o.stream for o in names.gathers}) == (1 if shared else 2)
    assert len({o.stream for o in names.scatters}) == (1 if shared else 2)


# ---- stops of the CPU ----


@pytest.mark.spec("LIM-02", "LIM-03")
@pytest.mark.parametrize("limited", [True, False])
@rank_among_fake_ranks(2)
def test_only_the_limiter_stops_the_cpu_before_a_third_unit(limited: bool) -> None:
    sharded = blocks.flat(limit_all_gathers=limited)
    blocks.logged(sharded)
    assert any("lifetime.py" in where for _, where in simulated.WORLD.stops) is limited
    # If the device finishes work only when the CPU waits for it, each all-gather except the first two stops the CPU.
    # The end of backward resets the limiter.
    assert sum(simulated.WORLD.stops.values()) == (5 if limited else 0)


@pytest.mark.spec("FS2-26", "MIG-14")
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["full", "zero-2"])
@rank_among_fake_ranks(2)
def test_a_step_of_fully_shard_never_stops_the_cpu_and_never_records_a_stream(options: dict[str, Any]) -> None:
    sharded = blocks.per_parameter(**options)
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        # A limiter would wait for this event. The original event is always complete.
        patch.setattr(lifetime, "DONE", NotYet())
        patch.setattr(type(torch.zeros(1, device=device())), "record_stream", lambda *_: recorded.append(1))
        blocks.logged(sharded)
    assert not simulated.WORLD.stops
    assert not recorded


@pytest.mark.spec("STREAM-10", "STREAM-11")
@either_api
@rank_among_fake_ranks(2)
def test_offload_stops_the_cpu_once_for_all_gradients_of_any_number_of_units(api: str) -> None:
    stops = []
    for num_blocks in (2, 6):
        sharded = offloaded(api, num_blocks)
        log = blocks.logged(sharded)
        stops.append(sum(simulated.WORLD.stops.values()))
        copies = {o.stream for o in log.operations if "between devices" in o.name}
        assert copies
        assert simulated.WORLD.main[0].number not in copies
    assert stops == [1, 1]


@pytest.mark.spec("STREAM-15")
@either_api
@rank_among_fake_ranks(2)
def test_offloaded_shards_may_be_written_when_an_evaluation_has_returned(api: str) -> None:
    sharded = offloaded(api)
    with torch.no_grad():
        sharded(torch.randn(3, 8, device=device()))
        for parameter in sharded.parameters():
            parameter.mul_(2)
    simulated.WORLD.assert_no_race()


@pytest.mark.spec("STREAM-13")
@pytest.mark.parametrize("pinned", [True, False])
@rank_among_fake_ranks(2)
def test_a_batch_may_be_overwritten_when_forward_has_begun(pinned: bool) -> None:
    sharded = blocks.flat()
    batch = torch.randn(3, 8)
    batch = batch.pin_memory() if pinned else batch
    sharded(batch)
    batch.zero_()
    simulated.WORLD.assert_no_race()


@pytest.mark.spec("STREAM-14")
@rank_among_fake_ranks(2)
def test_clipping_offloaded_gradients_stops_the_cpu_as_often_for_many_as_for_few() -> None:
    stops = []
    for num_blocks in (2, 6):
        sharded = blocks.flat(num_blocks, cpu_offload=subject.CPUOffload(offload_params=True), use_orig_params=True)
        sharded(torch.randn(3, 8, device=device())).sum().backward()
        simulated.WORLD.stops.clear()
        sharded.clip_grad_norm_(0.1)
        stops.append(sum(simulated.WORLD.stops.values()))
    assert stops[0] == stops[1]


# ---- memory ----

WIDE = 64
UNIT = WIDE * WIDE * 4
"""Bytes of a gathered block."""


def peaks(sharded: Any, num_steps: int = 2, *, trains: bool = False) -> list[int]:
    """The peak bytes of each of ``num_steps`` equal steps, minus the bytes before the first step."""
    module = torch.get_device_module(device())
    before, found = module.memory_allocated(), []
    for _ in range(num_steps):
        module.synchronize()
        module.reset_peak_memory_stats()
        with torch.set_grad_enabled(trains):
            loss = sharded(torch.randn(3, WIDE, device=device())).sum()
        if trains:
            loss.backward()
        for parameter in sharded.parameters():
            parameter.grad = None
        found.append(int(module.max_memory_allocated() - before))
    return found


@pytest.mark.spec("STREAM-17")
@rank_among_fake_ranks(2)
def test_prefetch_begins_after_the_output_of_the_all_gather_before_it_was_released() -> None:
    """The units are frozen, so gradients do not hide the memory of all-gathers."""
    model, module = blocks.per_parameter(6, WIDE).requires_grad_(False), torch.get_device_module(device())
    batch = torch.randn(3, WIDE, device=device(), requires_grad=True)
    for _ in range(2):
        loss = model(batch).sum()
        module.synchronize()
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        loss.backward()
    # The parameters of one unit, and the output of one all-gather.
    assert module.max_memory_allocated() - before < 2.5 * UNIT


@pytest.mark.spec("LIM-02", "LIM-06")
@rank_among_fake_ranks(2)
def test_without_the_limit_a_slow_device_has_every_unit_in_memory_at_once() -> None:
    assert 2 * UNIT <= peaks(blocks.flat(8, WIDE))[-1] < 3 * UNIT
    assert 8 * UNIT <= peaks(blocks.flat(8, WIDE, limit_all_gathers=False))[-1] < 9 * UNIT


@pytest.mark.spec("FS2-PREF-05")
@rank_among_fake_ranks(2)
def test_each_unit_that_is_prefetched_more_is_one_unit_more_in_memory() -> None:
    found = []
    for ahead in (1, 2, 3):
        sharded = blocks.per_parameter(8, WIDE)
        units = list(sharded)
        for number, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + ahead])
        found.append(peaks(sharded)[-1])
    assert [later - earlier for earlier, later in itertools.pairwise(found)] == [UNIT, UNIT]


@pytest.mark.spec("FS2-26")
@rank_among_fake_ranks(2)
def test_equal_steps_of_fully_shard_reach_the_same_peak_and_more_blocks_only_store_more() -> None:
    small, large = (peaks(blocks.per_parameter(num_blocks, WIDE), 4, trains=True) for num_blocks in (4, 8))
    assert len(set(small[1:])) == len(set(large[1:])) == 1
    # Each additional block adds a sharded gradient and its activations.
    activations = 3 * 3 * WIDE * 4
    assert large[-1] - small[-1] <= 4 * (UNIT // 2 + activations)


# ---- addresses ----


@pytest.mark.accelerator
@pytest.mark.spec("STREAM-12")
@ranks(2)
def test_unsharded_params_are_aligned_to_16_bytes() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(1, 7)).to(device())
    found = []
    for part in model:
        part.register_forward_hook(lambda module, *_: found.extend(p.data_ptr() % 16 for p in module.parameters()))
    subject.fully_shard(model, mesh=init_device_mesh(device().type, (2,)))
    model(torch.ones(2, 3, device=device())).sum().backward()
    assert found == [0] * 6
