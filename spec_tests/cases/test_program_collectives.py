"""Collectives that a program sends itself, memory of the process group, and a process group for reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models.torch_names import ShardPlacementResult

BF16, F32 = torch.bfloat16, torch.float32
LIBRARIES = {"minifsdp": minifsdp, "torch": torch_fsdp}
# Torch 2.13 renamed both functions.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Communication:
    """Sends by the process group, in memory of its own, which it fills with 77. Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, list[int]]] = []
        self.memory: list[torch.Tensor] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.memory.append(torch.full(tuple(size), 77, dtype=dtype, device=device))
        return self.memory[-1]

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any = None, async_op: bool = False
    ) -> Any:
        assert any(output_tensor.data_ptr() == memory.data_ptr() for memory in self.memory)
        self.calls.append((output_tensor.numel(), input_tensor.numel(), dist.get_process_group_ranks(group)))
        if op is None:
            return all_gather(output_tensor, input_tensor, group, async_op)
        return reduce_scatter(output_tensor, input_tensor, op, group, async_op)


def sharded_by(library: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(device())
    for layer in (model[0], model[2]):
        library.fully_shard(layer, **options)
    return library.fully_shard(model, **options)


def trained(model: Any) -> list[torch.Tensor]:
    """The full parameters after two steps of SGD, each with two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for micro_batch in range(2):
            inputs = torch.linspace(-1, 1, 24, device=device()).view(4, 6) * (1 + step + micro_batch + dist.get_rank())
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


@pytest.mark.spec("NEW-27")
@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), [(None, None), (BF16, F32), (torch.float16, None)])
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_an_object_sends_one_unit_and_no_value_changes(
    library: str, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    fsdp: Any = LIBRARIES[library]
    policy = fsdp.MixedPrecisionPolicy(param_dtype, reduce_dtype)
    usual = trained(sharded_by(fsdp, mp_policy=policy))
    model = sharded_by(fsdp, mp_policy=policy)
    gather, scatter = Communication(), Communication()
    model[0].set_custom_all_gather(gather)
    model[2].set_custom_reduce_scatter(scatter)

    found = trained(model)

    assert all(map(torch.equal, found, usual))
    # Layer 0 has 30 + 5 elements; dim 0 is padded to 6 rows: 3 * 6 + 3 for each rank. All-gathers: a forward and a
    # backward in each of four micro-batches. Layer 2 has 15 + 3 elements, padded to 4 rows: 2 * 5 + 2.
    assert gather.calls == 8 * [(42, 21, [0, 1])]
    assert scatter.calls == 4 * [(12, 24, [0, 1])]
    assert {memory.dtype for memory in gather.memory} == {param_dtype or F32}
    assert {memory.dtype for memory in scatter.memory} == {reduce_dtype or param_dtype or F32}


@pytest.mark.spec("NEW-27")
@ranks(2)
def test_the_object_still_sends_after_the_model_was_converted() -> None:
    model = sharded_by(minifsdp)
    gather = Communication()
    model[0].set_custom_all_gather(gather)
    model.double()
    model(torch.ones(4, 6, dtype=torch.float64, device=device()))
    assert gather.calls and {memory.dtype for memory in gather.memory} == {torch.float64}


@pytest.mark.spec("NEW-27", "NEW-33")
@ranks(2)
def test_an_object_that_cannot_send_is_an_error() -> None:
    model = sharded_by(minifsdp)
    for method in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(TypeError, match=r"rank \d: .*allocate\(\)"):
            method(lambda **_: None)
    model[0].set_custom_all_gather(Communication())
    for method in (model[0].set_allocate_memory_from_process_group_for_comm, model[0].set_symm_mem_for_comm):
        with pytest.raises(AssertionError, match="cannot be used together with set_custom_all_gather"):
            method(True)


@pytest.mark.spec("NEW-27")
@pytest.mark.needs("torch>=2.12")
@ranks(4)
def test_a_unit_with_several_meshes_refuses_an_object() -> None:
    grid = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    line = init_device_mesh(device().type, (4,))
    layer = nn.Linear(4, 4, device=device())
    other = ShardPlacementResult(None, FSDPMeshInfo(grid["shard"], 0))
    minifsdp.fully_shard(
        layer, mesh=line, shard_placement_fn=lambda parameter: other if parameter is layer.bias else None
    )
    for method in (layer.set_custom_all_gather, layer.set_custom_reduce_scatter):
        with pytest.raises(ValueError, match="if shard_placement_fn gives some parameters their own mesh"):
            method(Communication())


@pytest.mark.spec("NEW-27")
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_memory_of_the_process_group_changes_no_value(library: str) -> None:
    usual = trained(sharded_by(LIBRARIES[library]))
    model = sharded_by(LIBRARIES[library])
    for module in (model[0], model[2], model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    assert all(map(torch.equal, trained(model), usual))


@pytest.mark.spec("NEW-27")
@ranks(2)
def test_a_backend_that_allocates_memory_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = trained(sharded_by(minifsdp))
    model = sharded_by(minifsdp)
    sizes = []

    class Allocates:
        def supports_tensor_alloc(self, device: torch.device) -> bool:
            return True

        def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            sizes.append(size)
            return torch.empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda *_: Allocates())
    model[0].set_allocate_memory_from_process_group_for_comm(True)
    monkeypatch.undo()
    assert all(map(torch.equal, trained(model), usual))
    assert {42, 21} == {*sizes}
    sizes.clear()
    model[0].set_allocate_memory_from_process_group_for_comm(False)
    trained(model)
    assert not sizes


@pytest.mark.spec("NEW-28")
@pytest.mark.parametrize("recurse", [True, False])
@ranks(2)
def test_reductions_use_one_group_of_their_own_and_no_value_changes(
    recurse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = trained(sharded_by(minifsdp))
    model = sharded_by(minifsdp)
    scatter = Communication()
    groups = []
    model[2].set_custom_reduce_scatter(scatter)
    send = Communication.__call__

    def keep_group(self: Any, output_tensor: Any, input_tensor: Any, group: Any, **others: Any) -> Any:
        groups.append(group)
        return send(self, output_tensor, input_tensor, group, **others)

    monkeypatch.setattr(Communication, "__call__", keep_group)
    before = len(dist.distributed_c10d._world.pg_map)
    model.set_separate_reduce_scatter_group(recurse=recurse)
    model.set_separate_reduce_scatter_group(recurse=recurse)
    # One group for all units, and the root has no parameters of its own.
    assert len(dist.distributed_c10d._world.pg_map) == before + recurse
    assert all(map(torch.equal, trained(model), usual))
    assert {group is dist.group.WORLD for group in groups} == {not recurse}
    groups.clear()
    model.set_separate_reduce_scatter_group(False)
    trained(model)
    assert {group is dist.group.WORLD for group in groups} == {True}
