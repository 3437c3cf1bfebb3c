"""Memory is released after a step, and no record grows with the number of steps or of saves."""

from __future__ import annotations

import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.checks import agreement
from minifsdp.engine import collectives
from minifsdp.engine.mesh import Group
from minifsdp_gloo import transport as gloo
from spec_tests.harness import device, ranks
from spec_tests.models import apis, modules, running
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, fully_shard
from spec_tests.transport.counted_backend import Counted
from spec_tests.waiting import comes_true


def world() -> Group:
    return Group.of(dist.group.WORLD)


def num_bytes_behind(tensors: list[Any]) -> int:
    """The bytes of all storages of the tensors. A storage counts once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


@pytest.mark.spec("SHARD-06", "STREAM-17")
@pytest.mark.parametrize("hidden", [(), (1000, 2000, 3000, 4000)], ids=["small", "large"])
@pytest.mark.parametrize("kind", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, "fully_shard"], ids=str)
@ranks(2)
def test_gradients_hold_the_memory_of_their_shards_and_no_more(
    kind: ShardingStrategy | str, hidden: tuple[int, ...]
) -> None:
    plain = modules.seeded(lambda: modules.Stack(hidden=hidden))
    model: Any = apis.FULLY_SHARD.shard(plain) if isinstance(kind, str) else apis.WRAPPED.shard(plain, strategy=kind)
    for step in range(2):
        running.iterate(model, step)
    gradients = [parameter.grad for parameter in model.parameters()]
    stored = num_bytes_behind([parameter.detach() for parameter in model.parameters()])
    # The gradients of a unit are packed with the same padding as its parameters.
    assert num_bytes_behind(gradients) <= stored + 4 * len(gradients)


@pytest.mark.spec("FS2-SD-01", "FS2-05")
@ranks(2)
def test_a_saved_shard_has_the_bytes_of_its_own_elements_only() -> None:
    """`torch.save` writes the whole storage of a tensor, so a shard must not share the storage of its unit."""
    model = apis.FULLY_SHARD.shard(modules.seeded(lambda: modules.Stack(hidden=(1000, 2000, 3000, 4000))))
    for name, value in model.state_dict().items():
        file = io.BytesIO()
        torch.save(value.to_local(), file)
        assert value.to_local().untyped_storage().nbytes() == value.to_local().nbytes, name
        assert file.tell() < value.to_local().nbytes + 4000, name


@pytest.mark.spec("WIRE-10")
@pytest.mark.parametrize(("number", "kib", "sends"), [(40, 8, 1), (40, 255, 1), (3, 256, 3)])
@pytest.mark.cpu  # the transport of gloo
@ranks(2)
def test_many_small_parameters_are_sent_together(number: int, kib: int, sends: int) -> None:
    group = dist.new_group([0, 1])
    transport: Any = Group.of(group).transport
    mesh = torch.distributed.DeviceMesh.from_group(group, "cpu")
    model: Any = fully_shard(nn.Sequential(*(nn.Linear(256, 2 * kib, bias=False) for _ in range(number))), mesh=mesh)
    # The ranks compare one number for each collective of a new order.
    for _ in range(20):
        model.unshard()
        model.reshard()
    transport._backend = counted = Counted(transport._backend)
    model.unshard()
    assert counted.num_sends == sends
    transport._backend = counted._backend


@pytest.mark.spec("LEDGER-01", "WIRE-09")
@pytest.mark.parametrize("number", [10, 200_000])
@ranks(2)
def test_a_complete_collective_keeps_no_tensor_alive(number: int) -> None:
    group = world()
    for _ in range(2):
        output, local_shard = torch.zeros(2 * number, device=device()), torch.ones(number, device=device())
        handles = [collectives.all_gather(group, output, local_shard)]
        handles[-1].wait()
        whole, mine = torch.ones(2 * number, device=device()), torch.zeros(number, device=device())
        handles.append(collectives.reduce_scatter(group, mine, whole))
        handles[-1].wait()
        references = [weakref.ref(tensor) for tensor in (output, local_shard, whole, mine)]
        del output, local_shard, whole, mine
        assert comes_true(lambda references=references: not any(reference() is not None for reference in references))
        assert len(handles) == 2


@pytest.mark.spec("ORDER-10")
@pytest.mark.cpu  # the transport of gloo
@ranks(2)
def test_the_orders_that_the_ranks_remember_do_not_grow_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_MOST_KNOWN", 8)
    group = Group.of(dist.new_group([0, 1]))
    for number in range(1, 40):
        output = torch.zeros(2 * number)
        collectives.all_gather(group, output, torch.full((number,), 1.0 + group.rank)).wait()
        assert output.tolist() == [1.0] * number + [2.0] * number
        assert len(group.transport._known) <= 8


@pytest.mark.spec("LEDGER-11", "ORDER-10")
@pytest.mark.cpu  # the transport of gloo
@ranks(2, timeout=20)
def test_sizes_of_a_failed_collective_are_not_remembered() -> None:
    """Defect: the rank whose size is used later does not compare it again, and the other rank waits for it."""
    group = Group.of(dist.new_group([0, 1]))
    number = 4 + 4 * group.rank
    with pytest.raises(RuntimeError, match="are about to issue different collectives"):
        collectives.all_gather(group, torch.zeros(2 * number), torch.ones(number)).wait()
    output = torch.zeros(8)
    collectives.all_gather(group, output, torch.full((4,), 1.0 + group.rank)).wait()
    assert output.tolist() == [1.0] * 4 + [2.0] * 4


@pytest.mark.spec("SD-FULL-03")
@ranks(2)
def test_saves_leave_no_keys_in_the_store() -> None:
    model, store = apis.WRAPPED.shard(), dist.distributed_c10d._get_default_store()
    optimizer = torch.optim.Adam(model.parameters())
    running.iterate(model, 0, optimizer)
    numbers = []
    for has_facts in (False, True, False, True, False, True):
        model.state_dict()
        FSDP.optim_state_dict(model, optimizer)
        agreement.monitored_barrier([world()], "save", has_facts=has_facts)
        dist.barrier()
        if dist.get_rank() == 0:
            numbers.append(store.num_keys())
        dist.barrier()
    # A barrier without facts leaves one key less until the next one.
    assert numbers[2::2] == numbers[2:3] * len(numbers[2::2])
    assert numbers[3::2] == numbers[3:4] * len(numbers[3::2])


@pytest.mark.spec("LEDGER-01")
@ranks(2)
def test_a_step_keeps_no_input_and_no_output_alive() -> None:
    for model in (apis.WRAPPED.shard(), apis.FULLY_SHARD.shard()):
        x = running.batch()
        output = model(x)
        output.sum().backward()
        references = [weakref.ref(x), weakref.ref(output)]
        del x, output
        assert comes_true(lambda references=references: not any(reference() is not None for reference in references))
