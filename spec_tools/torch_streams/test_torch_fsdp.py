"""Runs the race checker on torch's own FSDP1 and FSDP2: it finds the known races and no others.

Each program builds a tiny model, shards it with torch's ``fully_shard`` or ``FullyShardedDataParallel``, and trains it
for two steps on the simulated device. The other ranks are fake ranks. All waits are torch's own. The results are for
torch 2.13.0. ``torch-findings.md`` explains the races.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from spec_tests.harness import rank_among_fake_ranks, simulated
from spec_tests.models.modules import MLP

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning"),
]
WORLD = simulated.WORLD
SIM = "sim"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), MLP(4, 8), MLP(4, 8), MLP(4, 8), nn.Linear(4, 3))


def batch() -> torch.Tensor:
    return torch.randn(6, 4, device=SIM)


def sharded(replicas: int = 1, model: nn.Module | None = None, **options: Any) -> Any:
    """A model in which each block and the root are sharded, over a 2-D mesh if there are ``replicas``."""
    model = network() if model is None else model
    if "offload_policy" not in options:
        model.to(SIM)
    num_shards = dist.get_world_size() // replicas
    sizes, names = ((replicas, num_shards), ("replicate", "shard")) if replicas > 1 else ((num_shards,), None)
    mesh = init_device_mesh(SIM, sizes, mesh_dim_names=names)
    for module in [module for module in model.modules() if isinstance(module, MLP)]:
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def units(model: nn.Module) -> list[Any]:
    """The modules that were sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def train(model: nn.Module, before_backward: Callable[[nn.Module, bool], object] | None = None) -> None:
    """Trains two steps. With ``before_backward(model, is_last)``, each step has three batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for place in range(3 if before_backward else 1):
            if before_backward:
                before_backward(model, place == 2)
            model(batch()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
HALF_REDUCED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": HALF,
    "bf16 reduction": HALF_REDUCED,
    "offload": OFFLOADED,
    "bf16 reduction, offload": {**HALF_REDUCED, **OFFLOADED},
}
ACCUMULATIONS: dict[str, Callable[[Any, bool], object]] = {
    "reduced each time": lambda model, is_last: None,
    "set_requires_gradient_sync": lambda model, is_last: model.set_requires_gradient_sync(is_last),
    "set_requires_all_reduce": lambda model, is_last: model.set_requires_all_reduce(is_last),
}


# ---- programs without a race ----


@pytest.mark.spec("SIM-10")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kept", [None, False])
@rank_among_fake_ranks(2)
def test_fully_shard_of_torch_has_no_race(option: str, kept: bool | None) -> None:
    WORLD.look_at(f"{os.sep}fsdp{os.sep}")
    train(sharded(reshard_after_forward=kept, **OPTIONS[option]))
    WORLD.assert_no_race()
    assert WORLD.num_operations > 50


@pytest.mark.spec("SIM-10")
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("option", OPTIONS)
@rank_among_fake_ranks(4)
def test_replicas_and_micro_batches_of_torch_have_no_race(option: str, accumulation: str) -> None:
    train(sharded(2, **OPTIONS[option]), ACCUMULATIONS[accumulation])
    WORLD.assert_no_race()


@pytest.mark.spec("SIM-10")
@rank_among_fake_ranks(2)
def test_prefetch_lists_and_an_event_of_torch_have_no_race() -> None:
    model = sharded(**HALF)
    blocks = units(model)[1:]
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, place - 2) : place][::-1])
    for _ in range(2):
        train(model)
        model.set_post_optim_event(torch.get_device_module(SIM).current_stream().record_event())
        batch().mul_(2)
    WORLD.assert_no_race()


LOW = MixedPrecision(torch.bfloat16, torch.bfloat16)
WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "original parameters": {"use_orig_params": True},
    "offload": {"cpu_offload": CPUOffload(True)},
    "all": {"mixed_precision": LOW, "cpu_offload": CPUOffload(True), "use_orig_params": True},
    "no limit": {"limit_all_gathers": False, "forward_prefetch": True},
    "no prefetch": {"backward_prefetch": None},
}


def wrapped(**options: Any) -> FullyShardedDataParallel:
    """A model in which each block and the root are wrapped."""
    policy = ModuleWrapPolicy({MLP})
    model = network().to(SIM)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device(SIM, 0), **options)


@pytest.mark.spec("SIM-10")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("option", WRAPPERS)
@rank_among_fake_ranks(2)
def test_wrapper_of_torch_has_no_race(option: str, strategy: str) -> None:
    model = wrapped(sharding_strategy=ShardingStrategy[strategy], **WRAPPERS[option])
    train(model)
    with model.no_sync():
        model(batch()).sum().backward()
    train(model)
    WORLD.assert_no_race()


# ---- programs with a race in torch 2.13 ----


def races_of(program: Callable[[], object]) -> set[tuple[str, str]]:
    """The later and the earlier operator of each race. Clears the races, so that they do not fail the test."""
    program()
    found = {(race.new.operator, race.old.operator) for race in WORLD.races.values() if race.old}
    WORLD.races.clear()
    return found


def all_reduced_by_a_hook(own_stream: bool = False, **options: Any) -> None:
    """The hook and the operators after it run on a separate stream, but use memory of the reduce-scatter stream.

    For a mesh with replicas, torch keeps the reduced gradient alive (``_all_reduce_state``), but not for
    ``set_all_reduce_hook`` without replicas. The gradient is freed after the launch of a cast, a copy to the CPU or an
    addition. The next reduce-scatter can write to its memory while they still run: wrong gradients.
    """
    stream = torch.get_device_module("sim").Stream() if own_stream else None
    model = sharded(**options)
    for unit in units(model):
        unit.set_all_reduce_hook(dist.all_reduce, stream=stream)
    train(model, None if options else lambda *_: None)


class Branches(nn.Module):
    """A model with two outputs; a loss of one output does not need the block of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = MLP(4, 8), MLP(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def two_losses() -> None:
    """An unused prefetch is freed at the end of a backward, and another backward starts an all-gather at once.

    ``right`` prefetches ``left``, which its loss does not need. At the end of this backward, the compute stream waits
    for the all-gather, and its output is freed. But the memory belongs to the copy-in stream, which does not wait. The
    copy-in of the second backward can get the same memory while the first all-gather still writes it: wrong weights in
    the second backward. (There is no race between steps: in a forward, the copy-in stream waits for everything.)
    """
    model = sharded(model=Branches())
    left, right = model(batch())
    right.sum().backward()
    left.sum().backward()


def written_after_a_forward(model: Any) -> None:
    """Offloaded parameters are copied from pinned memory, and the CPU does not wait for the end of the copies.

    After a backward, torch stops the CPU. After a forward without a backward it does not: an optimizer step or
    ``load_state_dict`` directly after an evaluation can overwrite memory that the device has not read yet. Reading the
    result of the evaluation first is a sufficient wait.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    with torch.no_grad():
        model(batch())
    optimizer.step()


def a_second_root_begins_later() -> None:
    """``share_comm_ctx``: the first forward of the second model creates the common streams again.

    This replaces the list that keeps the inputs of reduce-scatters alive. If the backward of the first model was not
    its last one, an input can still be in use. Its memory is reused by the next computation: wrong gradients.
    """
    first, second = sharded(), sharded()
    share_comm_ctx([first, second])
    first.set_is_last_backward(False)
    first(batch()).sum().backward()
    second(batch())


CAST, TO_CPU = "_to_copy", "_to_copy between devices"
FORWARD = ("fsdp::split_with_sizes_copy", "addmm", "tanh", "add")
SCATTER, GATHER, COPY_IN = "reduce_scatter_single", "all_gather_single", "fsdp::all_gather_copy_in"

HAZARDS: dict[str, tuple[Callable[[], object], set[tuple[str, str]]]] = {
    "hook, bf16 reduction": (lambda: all_reduced_by_a_hook(**HALF_REDUCED), {(SCATTER, CAST)}),
    "hook, its own stream": (lambda: all_reduced_by_a_hook(True, **HALF_REDUCED), {(SCATTER, CAST)}),
    "hook, offload": (lambda: all_reduced_by_a_hook(**OFFLOADED), {(SCATTER, TO_CPU)}),
    "hook, accumulation": (all_reduced_by_a_hook, {(SCATTER, "add_")}),
    "two losses": (two_losses, {(COPY_IN, GATHER)}),
    "written after a forward": (lambda: written_after_a_forward(sharded(**OFFLOADED)), {("add_", TO_CPU)}),
    "written after a forward, FullyShardedDataParallel": (
        lambda: written_after_a_forward(wrapped(cpu_offload=CPUOffload(True))),
        {("add_", TO_CPU)},
    ),
    "a second root begins later": (a_second_root_begins_later, {(later, SCATTER) for later in FORWARD}),
}


@pytest.mark.spec("SIM-10")
@pytest.mark.parametrize("name", HAZARDS)
@rank_among_fake_ranks(2)
def test_torch_fsdp_has_exactly_the_expected_races(name: str) -> None:
    program, expected = HAZARDS[name]
    assert races_of(program) == expected


@pytest.mark.spec("SIM-09")
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("plain", set()),  # the reduced tensor is the gradient itself, so it stays alive
        ("bf16", set()),
        ("bf16 reduction", {(SCATTER, CAST)}),
        ("offload", {(SCATTER, TO_CPU)}),
        ("bf16 reduction, offload", {(SCATTER, CAST)}),
    ],
)
@rank_among_fake_ranks(4)
def test_race_of_pull_request_180665_is_found_without_the_kept_reference(
    option: str, expected: set[tuple[str, str]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Parameter groups forget the reduced gradient that they must keep alive.
        forgets = property(lambda self: None, lambda self, value: None)
        patch.setattr(FSDPParamGroup, "_all_reduce_state", forgets, raising=False)
        assert races_of(lambda: train(sharded(2, **OPTIONS[option]))) == expected
