"""Who takes part. One line of `CONTENDERS` is one contender; the tables keep that order.

``single`` is the floor: the plain model on this rank's batch alone, nothing is averaged and nothing is sent. Nobody can
be faster, and the difference is what it costs to be several. The *peer* of a contender is the one of torch that makes
the same promises, so the one to be compared with.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from spec_tests.benchmarks.workloads import Workload
from spec_tests.oracles.gathering import wrap_units

__all__ = ["CONTENDERS", "Contender", "Trained", "adamw"]

ADAMW: dict[str, Any] = {"lr": 1e-3, "foreach": True}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """What all contenders step with."""
    return torch.optim.AdamW(model.parameters(), **ADAMW)


@dataclass(frozen=True)
class Trained:
    """A model in the hands of a contender.

    Attributes:
        model: to be called.
        no_sync: leaves the gradients of a backward on this rank.
        autocasts: whether low precision is the business of autocast.
        optimizer: makes what steps.
    """

    model: nn.Module
    no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    autocasts: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw


@dataclass(frozen=True)
class Contender:
    """A way to train a workload.

    Attributes:
        name: as the table shows it.
        take: takes the plain model.
        peer: name of the contender of torch that it stands in for, if it is one of ours.
        shards: whether it is an FSDP.
        never: strategies that it does not have.
    """

    name: str
    take: Callable[[nn.Module, Workload], Trained]
    peer: str | None = None
    shards: bool = True
    never: tuple[str, ...] = ()

    def runs(self, workload: Workload) -> bool:
        """Whether it can train the workload."""
        return workload.strategy not in self.never


def _single(model: nn.Module, workload: Workload) -> Trained:
    return Trained(model, autocasts=workload.bf16)


def _ddp(model: nn.Module, workload: Workload) -> Trained:
    ddp = DistributedDataParallel(model)
    return Trained(ddp, ddp.no_sync, autocasts=workload.bf16)


def _zero(model: nn.Module, workload: Workload) -> Trained:
    """ZeRO-1: each rank keeps the optimizer's state of some parameters, steps these, and sends them to the others."""
    # Warns of what it uses of torch, but not in a rank.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = _ddp(model, workload)
    return replace(trained, optimizer=lambda ddp: ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW))


def _wrapper(library: str, *, original: bool) -> Callable[[nn.Module, Workload], Trained]:
    """FSDP1, from a module that has its names."""

    def take(model: nn.Module, workload: Workload) -> Trained:
        words: Any = importlib.import_module(library)
        options: dict[str, Any] = {
            "sharding_strategy": words.ShardingStrategy[workload.strategy],
            "device_id": torch.device("cpu"),
            "use_orig_params": original,
        }
        if workload.is_hybrid:
            options["device_mesh"] = grid()
        if workload.bf16:
            # The angles that the GPT hands to its blocks are float32; FSDP2 casts such inputs without being asked.
            options["mixed_precision"] = words.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        with warnings.catch_warnings():
            # What torch has to say about NO_SHARD and about FSDP1 as such is not what is compared here.
            warnings.simplefilter("ignore")
            wrapped = wrap_units(
                model, (workload.unit_class,), lambda module: words.FullyShardedDataParallel(module, **options)
            )
        return Trained(wrapped, wrapped.no_sync)

    return take


def _function(library: str) -> Callable[[nn.Module, Workload], Trained]:
    """FSDP2, from a module that has its names."""

    def take(model: nn.Module, workload: Workload) -> Trained:
        words: Any = importlib.import_module(library)
        options: dict[str, Any] = {"reshard_after_forward": workload.strategy != "SHARD_GRAD_OP"}
        if workload.is_hybrid:
            options["mesh"] = grid()
        if workload.bf16:
            options["mp_policy"] = words.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        wrapped = wrap_units(model, (workload.unit_class,), lambda module: words.fully_shard(module, **options))

        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            wrapped.set_requires_gradient_sync(False)
            yield
            wrapped.set_requires_gradient_sync(True)

        return Trained(wrapped, no_sync)

    return take


def grid() -> DeviceMesh:
    """Replicas of two ranks that shard."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))


TORCH, OURS = "torch.distributed.fsdp", "minifsdp"

CONTENDERS = (
    Contender("single", _single, shards=False),
    Contender("DDP", _ddp, shards=False),
    Contender("DDP + ZeRO-1", _zero, shards=False),
    Contender("torch FSDP1 flat", _wrapper(TORCH, original=False)),
    Contender("torch FSDP1 orig", _wrapper(TORCH, original=True)),
    Contender("torch FSDP2", _function(TORCH), never=("NO_SHARD",)),
    Contender("minifsdp flat", _wrapper(OURS, original=False), peer="torch FSDP1 flat"),
    Contender("minifsdp orig", _wrapper(OURS, original=True), peer="torch FSDP1 orig"),
    Contender("minifsdp FSDP2", _function(OURS), peer="torch FSDP2", never=("NO_SHARD",)),
)
