"""Small programs with torch's own FSDPs for the race checker. All waits in them are torch's own.

Each program builds a tiny model, shards it with torch's ``fully_shard`` or ``FullyShardedDataParallel``, and trains it
for two steps on the simulated device. The other ranks are fake ranks. `PROGRAMS` contains the programs without races in
torch 2.13, each with the number of its ranks. `torch_hazards.py` contains programs with races.

Spec: SIM-09, SIM-10.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from spec_tests.models.modules import MLP

__all__ = [
    "HALF_REDUCED",
    "OFFLOADED",
    "OPTIONS",
    "PROGRAMS",
    "Program",
    "batch",
    "sharded",
    "train",
    "units",
    "wrapped",
]

Program = Callable[[], object]

SIM = "sim"


class Checkpointed(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Moody(nn.Module):
    """A model that skips a different block in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.calls = nn.ModuleList(MLP(4, 8) for _ in range(3)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for place, block in enumerate(self.blocks):
            if (place + self.calls) % 3:
                x = block(x)
        return x


def network(block: type[MLP] = MLP) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), block(4, 8), block(4, 8), block(4, 8), nn.Linear(4, 3))


def batch() -> torch.Tensor:
    return torch.randn(6, 4, device=SIM)


# ---- fully_shard ----

HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
HALF_REDUCED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
BOTH = {**HALF_REDUCED, **OFFLOADED}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": HALF,
    "bf16 reduction": HALF_REDUCED,
    "offload": OFFLOADED,
    "bf16 reduction, offload": BOTH,
}


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


ACCUMULATIONS: dict[str, Callable[[Any, bool], object]] = {
    "reduced each time": lambda model, is_last: None,
    "set_requires_gradient_sync": lambda model, is_last: model.set_requires_gradient_sync(is_last),
    "set_requires_all_reduce": lambda model, is_last: model.set_requires_all_reduce(is_last),
    "set_is_last_backward": lambda model, is_last: model.set_is_last_backward(is_last),
    "set_reshard_after_backward": lambda model, is_last: (
        model.set_requires_gradient_sync(is_last),
        model.set_reshard_after_backward(is_last),
        model.set_is_last_backward(is_last),
    ),
}


def prefetching(**options: Any) -> Any:
    model = sharded(**options)
    blocks = units(model)[1:]
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, place - 2) : place][::-1])
    return model


def each(model: Any, method: str, *arguments: Any) -> Any:
    """Calls ``method`` of each unit and returns the model. Other versions of torch may not have the method."""
    for unit in units(model):
        getattr(unit, method)(*arguments)
    return model


def unshard_by_hand() -> None:
    model = sharded()
    for _ in range(2):
        handles = [block.unshard(async_op=True) for block in units(model)[1:]]
        for handle in handles:
            handle.wait()
        model(batch()).sum().backward()
        each(model, "reshard")
    model.unshard(async_op=True)
    train(model)


def step_in_backward(replicas: int = 1, **options: Any) -> None:
    model = sharded(replicas, **options)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(functools.partial(_step, optimizer))
    for _ in range(2):
        model(batch()).sum().backward()


def _step(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def event_of_the_optimizer() -> None:
    model = sharded()
    for _ in range(2):
        train(model)
        model.set_post_optim_event(torch.get_device_module(SIM).current_stream().record_event())
        batch().mul_(2)


def evaluate_and_clip(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch()).sum().backward()
        with torch.no_grad():
            model(batch())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _of_fully_shard() -> Iterator[tuple[str, int, Program]]:
    for (name, options), num_ranks in itertools.product(OPTIONS.items(), (1, 2, 4)):
        yield name, num_ranks, lambda o=options: train(sharded(**o))
    for name, options in OPTIONS.items():
        yield f"{name}, replicas", 4, lambda o=options: train(sharded(2, **o))
        yield f"{name}, kept after forward", 2, lambda o=options: train(sharded(reshard_after_forward=False, **o))
        yield f"{name}, kept by two", 4, lambda o=options: train(sharded(reshard_after_forward=2, **o))
        yield f"{name}, prefetch", 2, lambda o=options: train(prefetching(**o))
    for (way, before), (name, options) in itertools.product(ACCUMULATIONS.items(), OPTIONS.items()):
        if name != "bf16":
            yield f"{name}, {way}", 2, lambda o=options, b=before: train(sharded(**o), b)
            yield f"{name}, replicas, {way}", 4, lambda o=options, b=before: train(sharded(2, **o), b)
    yield "prefetch, kept by two", 4, lambda: train(prefetching(reshard_after_forward=2))
    yield "prefetch, replicas", 4, lambda: train(prefetching(replicas=2, **HALF_REDUCED))
    yield "asynchronous unshard", 2, lambda: train(each(prefetching(**HALF), "_set_unshard_async_op", True))
    yield "unshard by hand", 2, unshard_by_hand
    for replicas in (1, 2):
        model = functools.partial(sharded, replicas, **HALF_REDUCED)
        call = functools.partial(lambda m, *method: train(each(m(), *method)), model)
        yield "buffers", 2 * replicas, functools.partial(call, "set_reduce_scatter_max_input_buffers", 3)
        yield "group", 2 * replicas, functools.partial(call, "set_separate_reduce_scatter_group", True)
        yield "step in backward", 2 * replicas, functools.partial(step_in_backward, replicas)
    yield "step in backward, offload", 2, lambda: step_in_backward(**OFFLOADED)
    yield "event of the optimizer", 2, event_of_the_optimizer
    yield "evaluation and clipping", 2, lambda: evaluate_and_clip(sharded())
    yield "checkpointing", 2, lambda: train(sharded(model=network(Checkpointed)))
    yield "checkpointing, kept by two", 4, lambda: train(sharded(model=network(Checkpointed), reshard_after_forward=2))
    yield "blocks that are left out", 2, lambda: train(sharded(model=Moody()), lambda *_: None)


# ---- FullyShardedDataParallel ----

LOW = MixedPrecision(torch.bfloat16, torch.bfloat16)
OPTIONS_OF_WRAPPER: dict[str, dict[str, Any]] = {
    "plain": {},
    "original parameters": {"use_orig_params": True},
    "bf16": {"mixed_precision": LOW},
    "bf16, reduced in float32": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "offload": {"cpu_offload": CPUOffload(True)},
    "all": {"mixed_precision": LOW, "cpu_offload": CPUOffload(True), "use_orig_params": True},
}


def wrapped(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **options: Any) -> FullyShardedDataParallel:
    """A model in which each block and the root are wrapped."""
    if "HYBRID" in strategy.name:
        options["device_mesh"] = init_device_mesh(SIM, (2, 2))
    model = options.pop("model", None) or network()
    return FullyShardedDataParallel(
        model.to(SIM),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({MLP, Checkpointed}),
        device_id=torch.device(SIM, 0),
        **options,
    )


def accumulate_in_no_sync(**options: Any) -> None:
    model = wrapped(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.no_sync():
            model(batch()).sum().backward()
        for _ in range(2):
            model(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate_clip_and_summon() -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch()).sum().backward()
        with torch.no_grad():
            model(batch())
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        with model.summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def _of_the_wrapper() -> Iterator[tuple[str, int, Program]]:
    for strategy, (name, options) in itertools.product(ShardingStrategy, OPTIONS_OF_WRAPPER.items()):
        num_ranks = 4 if "HYBRID" in strategy.name else 2
        yield f"{strategy.name}, {name}", num_ranks, lambda s=strategy, o=options: train(wrapped(s, **o))
    for name, options in OPTIONS_OF_WRAPPER.items():
        yield name, 1, lambda o=options: train(wrapped(**o))
        yield f"no_sync, {name}", 2, lambda o=options: accumulate_in_no_sync(**o)
    yield "no limit", 2, lambda: train(wrapped(limit_all_gathers=False))
    yield "forward prefetch", 2, lambda: train(wrapped(forward_prefetch=True))
    for prefetch in (BackwardPrefetch.BACKWARD_POST, None):
        yield f"backward prefetch {prefetch}", 2, lambda p=prefetch: train(wrapped(backward_prefetch=p))
    yield "checkpointing", 2, lambda: train(wrapped(model=network(Checkpointed)))
    yield "evaluation, clipping, full parameters", 2, evaluate_clip_and_summon


PROGRAMS: dict[str, tuple[int, Program]] = {
    f"{api}, {name}, {num_ranks}": (num_ranks, program)
    for api, programs in (("fully_shard", _of_fully_shard()), ("FullyShardedDataParallel", _of_the_wrapper()))
    for name, num_ranks, program in programs
}
