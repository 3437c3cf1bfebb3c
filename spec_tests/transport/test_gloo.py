"""Collectives between CPUs: the messages, their size and their timing."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from minifsdp.checks.collective import Collective
from minifsdp.checks.collective_log import log
from minifsdp.engine import collectives
from minifsdp.engine.events import events
from minifsdp.engine.mesh import Group
from minifsdp_gloo import transport as gloo
from spec_tests.harness import ranks
from spec_tests.harness.programs import output_of_ranks
from spec_tests.live_bytes import LiveBytes
from spec_tests.oracles.counting import count_collectives
from spec_tests.transport.counted_backend import Counted
from spec_tests.waiting import comes_true

pytestmark = pytest.mark.cpu

SCRIPT = pathlib.Path(__file__).with_name("wire_ends.py")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64, torch.bool]


def world() -> Group:
    return Group.of(dist.group.WORLD)


def values(number: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Values that differ between ranks. Their sum depends on the order of the ranks."""
    drawn = torch.randn(number, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    return (drawn > 0) if dtype is torch.bool else drawn.to(dtype)


def assert_exchanged_values_are_right(group: Group, number: int, dtype: torch.dtype) -> None:
    """All-gathers and reduce-scatters ``number`` values of each rank. Sums are in the order of the ranks."""
    output = torch.empty(group.size * number, dtype=dtype)
    collectives.all_gather(group, output, values(number, group.rank, dtype)).wait()
    assert torch.equal(output, torch.cat([values(number, rank, dtype) for rank in range(group.size)]))
    if dtype is not torch.bool:
        local_shard = torch.empty(number, dtype=dtype)
        collectives.reduce_scatter(group, local_shard, values(group.size * number, group.rank, dtype)).wait()
        of_ranks = [values(group.size * number, rank, dtype) for rank in range(group.size)]
        total = functools.reduce(torch.add, of_ranks)
        assert torch.equal(local_shard, total.tensor_split(group.size)[group.rank])


def group_with_transport(least_bytes: int) -> Group:
    """The group of all ranks, with a transport that sends shards of fewer bytes in gloo's thread."""
    group: Any = world()
    vars(group)["transport"] = gloo.Transport(group.process_group._get_backend(torch.device("cpu")), least_bytes)
    return group


# 0 selects the transport's messages, and 2**30 selects gloo's thread.
WAYS = pytest.mark.parametrize("least_bytes", [0, 2**30], ids=["large", "small"])


@pytest.mark.spec("WIRE-01", "WIRE-02")
@pytest.mark.parametrize("number", [0, 1, 5, 70_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@WAYS
@ranks(2)
def test_two_ranks_all_gather_and_reduce_scatter_correctly(number: int, dtype: torch.dtype, least_bytes: int) -> None:
    assert_exchanged_values_are_right(group_with_transport(least_bytes), number, dtype)


@pytest.mark.spec("WIRE-01", "WIRE-02")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@WAYS
@ranks(4)
def test_four_ranks_sum_in_the_order_of_the_ranks(dtype: torch.dtype, least_bytes: int) -> None:
    assert_exchanged_values_are_right(group_with_transport(least_bytes), 100, dtype)


@pytest.mark.spec("WIRE-02")
@ranks(4)
def test_a_group_of_some_ranks_sends_between_these_alone() -> None:
    members = [1, 3]
    process_group = dist.new_group(members)
    if dist.get_rank() in members:
        group = Group.of(process_group)
        output = torch.empty(4)
        collectives.all_gather(group, output, torch.full((2,), float(dist.get_rank()))).wait()
        assert output.tolist() == [1.0, 1.0, 3.0, 3.0]
        local_shard = torch.empty(2)
        collectives.reduce_scatter(group, local_shard, output * (group.rank + 1)).wait()
        assert local_shard.tolist() == [[3.0, 3.0], [9.0, 9.0]][group.rank]


@pytest.mark.spec("WIRE-03")
@pytest.mark.parametrize("least_bytes", [400, 401], ids=["messages", "gloo's thread"])
@pytest.mark.parametrize("size", [2, 4])
@ranks(4)
def test_each_rank_sends_one_shard_of_400_bytes_to_each_other_rank(size: int, least_bytes: int) -> None:
    process_group: Any = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return
    backend = Counted(process_group._get_backend(torch.device("cpu")))
    transport = gloo.Transport(backend, least_bytes)
    expected = {rank: 400 for rank in range(size) if rank != dist.get_rank()}
    transport.reduce_scatter_single(torch.empty(100), torch.ones(size * 100), None).wait()
    assert backend.sent == expected
    assert backend.num_in_thread == (1 if least_bytes == 401 else 0)
    if size == 4 and least_bytes == 401:
        return  # Gloo's own all-gather, whose messages are not counted.
    backend.sent.clear()
    transport.all_gather_single(torch.empty(size * 100), torch.ones(100), None).wait()
    assert backend.sent == expected


@pytest.mark.spec("WIRE-11")
@pytest.mark.pure
@pytest.mark.parametrize(("num_polls_needed", "num_polls"), [(0, 1), (5, 6), (1000, 10)])
def test_small_shard_is_polled_before_sleep(
    num_polls_needed: int, num_polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each reading of the clock advances it by a tenth of the polling time.
    ticks = itertools.count()
    monkeypatch.setattr(gloo, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * gloo._POLL_SECONDS / 10))
    work = Mock()
    work.is_completed.side_effect = [False] * num_polls_needed + [True]
    gloo._PollingWork(work).wait()
    assert (work.is_completed.call_count, work.wait.call_count) == (num_polls, 1)
    work.is_completed.side_effect = [True]
    work.wait.side_effect = RuntimeError("closed")
    with pytest.raises(RuntimeError, match="closed"):
        gloo._PollingWork(work).wait()


@pytest.mark.spec("WIRE-11")
@pytest.mark.parametrize("size", [2, 3])
@ranks(3)
def test_collectives_in_the_gloo_thread_return_a_polling_work(size: int) -> None:
    process_group: Any = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return
    transport = gloo.Transport(process_group._get_backend(torch.device("cpu")), least_bytes=2**18)
    gathered = transport.all_gather_single(torch.empty(size), torch.ones(1), AllgatherOptions())
    assert type(gathered) is gloo._PollingWork
    gathered.wait()
    summed = transport.reduce_scatter_single(torch.empty(1), torch.ones(size), None)
    assert type(summed._work) is gloo._PollingWork
    summed.wait()


@pytest.mark.spec("WIRE-04")
@pytest.mark.parametrize("size", [2, 4])
@ranks(4)
def test_an_all_gather_needs_no_extra_memory_and_a_reduce_scatter_that_of_the_other_shards(size: int) -> None:
    os.environ["MINIFSDP_TRANSPORT"] = "messages"
    process_group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return
    group = Group.of(process_group)
    with LiveBytes() as live:
        output, local_shard = torch.zeros(size * 1000), torch.zeros(1000)
        given = live.now()
        live.forget_peak()
        collectives.all_gather(group, output, local_shard).wait()
        assert live.peak == given
        live.forget_peak()
        collectives.reduce_scatter(group, local_shard, output).wait()
        assert live.peak == given + (size - 2) * local_shard.nbytes


@pytest.mark.spec("WIRE-05")
@ranks(2)
def test_issuing_rank_continues_before_others_arrive() -> None:
    group, output, local_shard = world(), torch.zeros(2_000_000), torch.full((1_000_000,), 1.0 + dist.get_rank())
    store = dist.distributed_c10d._get_default_store()
    store.delete_key("rank 0 has issued")

    def issue() -> tuple[Collective, Collective]:
        log.sequence_of(group).begin_epoch()
        gathered = collectives.all_gather(group, output, local_shard)
        return gathered, collectives.reduce_scatter(group, torch.empty_like(local_shard), torch.ones(2_000_000))

    for handle in issue():  # in the first call, all ranks check that their sizes are equal
        handle.wait()
    dist.barrier()
    if group.rank == 1:
        store.wait(["rank 0 has issued"])
    gathered, summed = issue()
    if group.rank == 0:
        store.set("rank 0 has issued", "")
    gathered.wait()
    summed.wait()
    assert output[[0, -1]].tolist() == [1.0, 2.0]


@pytest.mark.spec("WIRE-05")
@ranks(2)
def test_several_collectives_run_with_messages_of_program() -> None:
    group, rank = world(), dist.get_rank()
    outputs, sums = [torch.empty(2) for _ in range(3)], [torch.empty(1) for _ in range(3)]
    mine, theirs = torch.tensor([100.0 + rank]), torch.empty(1)
    received = dist.irecv(theirs, 1 - rank)
    handles = [
        collectives.all_gather(group, output, torch.tensor([10.0 * i + rank])) for i, output in enumerate(outputs)
    ]
    sent = dist.isend(mine, 1 - rank)
    wholes = [torch.tensor([1.0 * i, 2.0 * i]) for i in range(3)]
    handles += [collectives.reduce_scatter(group, sums[i], wholes[i]) for i in range(3)]
    # Wait for the handles in a different order from the order of issue.
    for handle in reversed(handles):
        handle.wait()
    for work in (received, sent):
        assert work is not None
        work.wait()
    assert [output.tolist() for output in outputs] == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    assert [local_shard.item() for local_shard in sums] == [0.0, 2.0 * (1 + rank), 4.0 * (1 + rank)]
    assert theirs.item() == 101.0 - rank


@pytest.mark.spec("WIRE-09")
@ranks(2)
def test_unawaited_collective_does_not_affect_the_next() -> None:
    group, output = world(), torch.empty(2)
    for number in range(20):
        lost = torch.full((400_000,), -1.0)
        collectives.all_gather(group, lost, lost[:200_000].clone())
        collectives.reduce_scatter(group, torch.empty(200_000), lost)
        memory = weakref.ref(lost)
        del lost
        collectives.all_gather(group, output, torch.tensor([10.0 * number + group.rank])).wait()
        assert output.tolist() == [10.0 * number, 10.0 * number + 1]
        local_shard = torch.empty(1)
        collectives.reduce_scatter(group, local_shard, output).wait()
        assert local_shard.item() == 2 * output[group.rank]
        assert comes_true(lambda: memory() is None), "the buffer is kept until the data has arrived"


@pytest.mark.spec("WIRE-06")
@ranks(2)
def test_counting_modes_count_each_collective_once() -> None:
    group, output, local_shard = world(), torch.zeros(6), torch.ones(3)
    with count_collectives() as counts:
        collectives.all_gather(group, output, local_shard).wait()
        assert output.tolist() == [1.0] * 6
        collectives.reduce_scatter(group, local_shard, output).wait()
    assert local_shard.tolist() == [2.0] * 3
    assert counts.order == [("all_gather", 24), ("reduce_scatter", 24)]


@pytest.mark.spec("WIRE-01", "WIRE-07")
@ranks(2)
def test_gloo_thread_sends_shards_below_256_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIFSDP_TRANSPORT")
    transport = Group.of(dist.new_group()).transport
    for number, num_in_thread in ((2**16 - 1, 2), (2**16, 0)):
        transport._backend = backend = Counted(transport._backend)
        output, local_shard = torch.zeros(2 * number), torch.full((number,), 1.0 + dist.get_rank())
        transport.all_gather_single(output, local_shard, None).wait()
        transport.reduce_scatter_single(local_shard, output, None).wait()
        assert local_shard[[0, -1]].tolist() == [2.0 * (1 + dist.get_rank())] * 2
        assert backend.num_in_thread == num_in_thread


@pytest.mark.spec("WIRE-07")
@ranks(2)
def test_the_switch_leaves_the_collectives_to_gloo() -> None:
    os.environ["MINIFSDP_TRANSPORT"] = "messages"
    process_group: Any = dist.group.WORLD
    assert gloo.transport_between(process_group) is not None
    os.environ["MINIFSDP_TRANSPORT"] = "collectives"
    assert gloo.transport_between(process_group) is None
    group, output = world(), torch.zeros(4)
    assert group.transport is None
    collectives.all_gather(group, output, torch.full((2,), float(group.rank))).wait()
    assert output.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.spec("WIRE-02", "WIRE-07")
@ranks(2)
def test_without_a_transport_the_process_group_sends_everything_with_the_same_results() -> None:
    found = []
    for has_transport in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not has_transport:
                patch.setattr(events, "transport", lambda _: None)
            group = Group.of(dist.new_group())
            assert (group.transport is not None) is has_transport
            local_shard = torch.empty(300_000)
            drawn = torch.randn(600_000, generator=torch.Generator().manual_seed(dist.get_rank()))
            collectives.reduce_scatter(group, local_shard, drawn).wait()
            output = torch.empty(600_000)
            collectives.all_gather(group, output, local_shard).wait()
            found.append(output)
    assert torch.equal(*found)


@pytest.mark.spec("WIRE-07")
@pytest.mark.pure
def test_other_backends_keep_their_own_collectives() -> None:
    assert gloo.transport_between(None) is None
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)
    assert gloo.transport_between(group) is None


@pytest.mark.spec("WIRE-08")
def test_exit_of_one_rank_ends_the_wait_of_the_other() -> None:
    # Clear the variable, so that the default applies.
    printed = output_of_ranks(SCRIPT, num_ranks=2, environment={"MINIFSDP_TRANSPORT": ""}, limit=60.0)
    assert "rank 0: RuntimeError" in printed
    assert printed.count("[1.0, 1.0, 1.0, 1.0], Transport") == 2


@pytest.mark.spec("WIRE-07")
def test_detail_debug_mode_uses_torch_collectives() -> None:
    printed = output_of_ranks(SCRIPT, num_ranks=2, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, limit=60.0)
    assert printed.count("[1.0, 1.0, 1.0, 1.0], NoneType") == 2


@pytest.mark.spec("WIRE-08")
@ranks(2)
def test_missing_rank_ends_a_collective_after_the_timeout_of_the_group() -> None:
    os.environ["MINIFSDP_TRANSPORT"] = "messages"
    group, new = (Group.of(dist.new_group([0, 1], timeout=timedelta(seconds=1))) for _ in range(2))
    collectives.all_gather(group, torch.zeros(4), torch.zeros(2)).wait()
    log.sequence_of(group).begin_epoch()
    if group.rank == 0:
        handle = collectives.all_gather(group, torch.zeros(4), torch.zeros(2))
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            handle.wait()
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            # The first all-gather of a size also uses messages.
            collectives.all_gather(new, torch.zeros(4), torch.zeros(2)).wait()
