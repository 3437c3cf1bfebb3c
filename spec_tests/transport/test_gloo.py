"""Collectives between CPUs: the messages, their size and their timing."""

from __future__ import annotations

import itertools
import os
import pathlib
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions

from minifsdp import FullyShardedDataParallel, fully_shard
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

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64, torch.bool]


def world() -> Group:
    return Group.of(dist.group.WORLD)


def values(number: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ between ranks. Their sum depends on the order of the ranks."""
    drawn = torch.randn(number, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    return (drawn > 0) if dtype is torch.bool else drawn.to(dtype)


def parts(number: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The contribution of each rank to this rank's shard."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return [values(number * size, other, dtype).tensor_split(size)[rank] for other in range(size)]


def check_values(number: int, dtype: torch.dtype, least_bytes: int) -> None:
    group, local_shard = world(), values(number, dist.get_rank(), dtype)
    vars(group)["transport"] = gloo.Transport(group.process_group._get_backend(torch.device("cpu")), least_bytes)
    output = torch.empty(group.size * number, dtype=dtype)
    collectives.all_gather(group, output, local_shard).wait()
    assert torch.equal(output, torch.cat([values(number, rank, dtype) for rank in range(group.size)]))
    if dtype is torch.bool:
        return
    collectives.reduce_scatter(group, local_shard, values(group.size * number, group.rank, dtype)).wait()
    by_rank = parts(number, dtype)
    expected = by_rank[0].clone()
    for part in by_rank[1:]:
        expected += part
    assert torch.equal(local_shard, expected), "the parts are summed in the order of the ranks"


# 0 selects the transport's messages, and 2**30 selects gloo's thread.
WAYS = pytest.mark.parametrize("least_bytes", [0, 2**30], ids=["large", "small"])


@pytest.mark.spec("WIRE-01", "WIRE-02")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@WAYS
@ranks(2)
def test_two_ranks_all_gather_and_reduce_scatter_correctly(dtype: torch.dtype, least_bytes: int) -> None:
    for number in (0, 1, 5, 70_000):
        check_values(number, dtype, least_bytes)


@pytest.mark.spec("WIRE-01", "WIRE-02")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@WAYS
@ranks(4)
def test_four_ranks_sum_in_the_order_of_the_ranks(dtype: torch.dtype, least_bytes: int) -> None:
    check_values(1000, dtype, least_bytes)


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


def check_sent_bytes() -> None:
    """Each rank sends one shard to each other rank, as messages and in gloo's thread."""
    group = world()
    others = [rank for rank in range(group.size) if rank != group.rank]
    # Shards of fewer bytes are sent in gloo's thread. More than two ranks all-gather them in another way.
    for least_bytes in (400, 401):
        backend = Counted(group.process_group._get_backend(torch.device("cpu")))
        transport = gloo.Transport(backend, least_bytes)
        if group.size == 2 or least_bytes == 400:
            transport.all_gather_single(torch.empty(group.size * 100), torch.ones(100), None).wait()
            assert backend.sent == dict.fromkeys(others, 400)
        backend.sent.clear()
        transport.reduce_scatter_single(torch.empty(100), torch.ones(group.size * 100), None).wait()
        assert backend.sent == dict.fromkeys(others, 400)
        assert backend.num_in_thread == (0 if least_bytes == 400 else 2 if group.size == 2 else 1)


@pytest.mark.spec("WIRE-03")
@ranks(2)
def test_two_ranks_send_each_shard_once() -> None:
    check_sent_bytes()


@pytest.mark.spec("WIRE-03")
@ranks(4)
def test_each_of_four_ranks_sends_one_shard_to_each_other_rank() -> None:
    check_sent_bytes()


class Coming:
    """A work of gloo's thread that counts polls and waits.

    Args:
        after: the number of polls before it is complete.
        error: the exception that `wait` raises, if any.
    """

    def __init__(self, after: int, error: Exception | None = None) -> None:
        self._after, self._error = after, error
        self.num_looks = self.num_waits = 0

    def is_completed(self) -> bool:
        self.num_looks += 1
        return self.num_looks > self._after

    def wait(self) -> None:
        self.num_waits += 1
        if self._error is not None:
            raise self._error


@pytest.mark.spec("WIRE-11")
@pytest.mark.pure
def test_small_shard_is_polled_before_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each reading of the clock advances it by a tenth of the polling time.
    ticks = itertools.count()
    monkeypatch.setattr(gloo, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * gloo._POLL_SECONDS / 10))
    for after, num_looks in ((0, 1), (5, 6), (1000, 10)):
        work = Coming(after)
        gloo._PollingWork(work).wait()
        assert (work.num_looks, work.num_waits) == (num_looks, 1)
    with pytest.raises(RuntimeError, match="closed"):
        gloo._PollingWork(Coming(1, RuntimeError("closed"))).wait()


@pytest.mark.spec("WIRE-11")
@pytest.mark.parametrize("size", [2, 3])
@ranks(3)
def test_collectives_in_the_gloo_thread_return_a_polling_work(size: int) -> None:
    process_group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return
    backend = process_group._get_backend(torch.device("cpu"))
    transport = gloo.Transport(backend, least_bytes=2**18)
    gathered = transport.all_gather_single(torch.empty(size), torch.ones(1), AllgatherOptions())
    assert type(gathered) is gloo._PollingWork
    gathered.wait()
    summed = transport.reduce_scatter_single(torch.empty(1), torch.ones(size), None)
    assert type(summed._work) is gloo._PollingWork
    summed.wait()


def memory_of(number: int) -> tuple[int, int]:
    """Extra bytes that an all-gather and a reduce-scatter of ``number`` elements per rank allocate."""
    group = world()
    with LiveBytes() as live:
        output, local_shard = torch.zeros(group.size * number), torch.zeros(number)
        given = live.now()
        live.forget_peak()
        collectives.all_gather(group, output, local_shard).wait()
        gathering = live.peak - given
        live.forget_peak()
        collectives.reduce_scatter(group, local_shard, output).wait()
    return gathering, live.peak - given


@pytest.mark.spec("WIRE-04")
@ranks(2)
def test_two_ranks_need_no_extra_memory() -> None:
    assert memory_of(1000) == (0, 0)


@pytest.mark.spec("WIRE-04")
@ranks(4)
def test_four_ranks_need_memory_of_two_shards_to_reduce() -> None:
    os.environ["MINIFSDP_TRANSPORT"] = "messages"
    assert memory_of(1000) == (0, 2 * 4000)


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


def trained(function: bool) -> list[torch.Tensor]:
    """The weights after three steps of a model with large and small parameters, in a process group of its own."""
    process_group: Any = dist.new_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 700), nn.Tanh(), nn.Linear(700, 500), nn.Linear(500, 3))
    if function:
        mesh = torch.distributed.DeviceMesh.from_group(process_group, "cpu")
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
    else:
        model = FullyShardedDataParallel(model, process_group, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(4, 600, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(value, "full_tensor", value.clone)() for value in model.state_dict().values()]


@pytest.mark.spec("WIRE-02", "WIRE-07")
@pytest.mark.parametrize("function", [True, False], ids=["fully_shard", "wrapper"])
@ranks(2)
def test_without_a_transport_the_process_group_sends_everything(function: bool) -> None:
    with_transport = trained(function)
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "transport", asked.append)
        without = trained(function)
        assert Group.of(dist.new_group()).transport is None
    assert len(asked) > 1
    assert all(map(torch.equal, without, with_transport))


@pytest.mark.spec("WIRE-07")
@pytest.mark.pure
def test_other_backends_keep_their_own_collectives() -> None:
    assert gloo.transport_between(None) is None
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)
    assert gloo.transport_between(group) is None


HERE = pathlib.Path(__file__).parent


@pytest.mark.spec("WIRE-08")
def test_exit_of_one_rank_ends_the_wait_of_the_other() -> None:
    # Clear the variable, so that the default applies.
    environment = {"MINIFSDP_TRANSPORT": ""}
    printed = output_of_ranks(HERE / "wire_ends.py", num_ranks=2, environment=environment, limit=60.0)
    assert "rank 0: RuntimeError" in printed
    assert printed.count("[1.0, 1.0, 1.0, 1.0], Transport") == 2


@pytest.mark.spec("WIRE-07")
def test_detail_debug_mode_uses_torch_collectives() -> None:
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    printed = output_of_ranks(HERE / "wire_ends.py", num_ranks=2, environment=environment, limit=60.0)
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
