"""The contenders: who trains. The tables keep the order of `CONTENDERS`.

``single`` is the lower bound: the plain model on this rank's batch, without communication. No contender can be faster,
and the difference is the cost of distributed training. The *peer* of a contender is torch's implementation of the same
features, with which it is compared.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from spec_tests.oracles.gathering import wrap_units
from spec_tools.benchmarks.workloads import NODES, Workload

TORCH, OURS = "torch.distributed.fsdp", "minifsdp"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trained:
    """A model that a contender has prepared for training.

    Attributes:
        model: the callable model.
        no_sync: context in which backward does not reduce gradients.
        autocasts: whether autocast provides the low precision.
    """

    model: nn.Module
    no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    autocasts: bool = False


@dataclass(frozen=True)
class Contender:
    """A way to train a workload.

    Attributes:
        name: name in the table.
        take: prepares the plain model for training.
        peer: for a contender of minifsdp, the name of the torch contender that it replaces.
        shards: whether it is an FSDP of torch or minifsdp.
    """

    name: str
    take: Callable[[nn.Module, Workload], Trained]
    peer: str | None = None
    shards: bool = True

    def runs(self, workload: Workload) -> bool:
        """Whether it can train the workload. ``fully_shard`` always shards, and always prefetches in backward."""
        is_function = self.name.endswith("FSDP2")
        return not is_function or (workload.strategy != "NO_SHARD" and workload.backward_prefetch)


def _single(model: nn.Module, workload: Workload) -> Trained:
    return Trained(model, autocasts=workload.bf16)


def _ddp(model: nn.Module, workload: Workload) -> Trained:
    ddp = DistributedDataParallel(model)
    return Trained(ddp, ddp.no_sync, autocasts=workload.bf16)


def _nodes(num_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (NODES, num_ranks // NODES), mesh_dim_names=("replicate", "shard"))


def _wrapper(library: str, *, original: bool) -> Callable[[nn.Module, Workload], Trained]:
    """FSDP1 of the module ``library``."""

    def take(model: nn.Module, workload: Workload) -> Trained:
        words: Any = importlib.import_module(library)
        options: dict[str, Any] = {
            "sharding_strategy": words.ShardingStrategy[workload.strategy],
            "device_id": CPU,
            "use_orig_params": original,
            "forward_prefetch": workload.prefetch,
            "backward_prefetch": words.BackwardPrefetch.BACKWARD_PRE if workload.backward_prefetch else None,
        }
        if workload.is_hybrid:
            options["device_mesh"] = _nodes(workload.num_ranks)
        if workload.bf16:
            # The angles that the GPT passes to its blocks are float32. FSDP2 casts such inputs by default.
            options["mixed_precision"] = words.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        with warnings.catch_warnings():
            # torch warns about NO_SHARD and about FSDP1 in general, which does not matter here.
            warnings.simplefilter("ignore")
            wrapped = wrap_units(
                model, (workload.unit_class,), lambda module: words.FullyShardedDataParallel(module, **options)
            )
        return Trained(wrapped, wrapped.no_sync)

    return take


def _function(library: str) -> Callable[[nn.Module, Workload], Trained]:
    """FSDP2 of the module ``library``."""

    def take(model: nn.Module, workload: Workload) -> Trained:
        words: Any = importlib.import_module(library)
        options: dict[str, Any] = {"reshard_after_forward": workload.strategy in ("FULL_SHARD", "HYBRID_SHARD")}
        if workload.is_hybrid:
            options["mesh"] = _nodes(workload.num_ranks)
        if workload.bf16:
            options["mp_policy"] = words.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        wrapped = wrap_units(model, (workload.unit_class,), lambda module: words.fully_shard(module, **options))
        if workload.prefetch:
            for module, following in itertools.pairwise([wrapped, *workload.units_of(wrapped)]):
                module.set_modules_to_forward_prefetch([following])

        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            wrapped.set_requires_gradient_sync(False)
            yield
            wrapped.set_requires_gradient_sync(True)

        return Trained(wrapped, no_sync)

    return take


def materialized(
    library: str, build: Callable[[], nn.Module], unit_class: type[nn.Module], *, by_function: bool, **options: Any
) -> nn.Module:
    """A model that is built on the meta device, sharded, and materialized with the same values on all ranks.

    FSDP1 materializes a whole unit and shards it, one unit at a time. FSDP2 shards the shapes first.
    """
    words: Any = importlib.import_module(library)
    with torch.device("meta"):
        model = build()
    if by_function:
        sharded: nn.Module = wrap_units(model, (unit_class,), words.fully_shard)
        return sharded.to_empty(device=CPU).apply(_fill)
    options |= {"param_init_fn": _make_real, "device_id": CPU}
    wrapped: nn.Module = wrap_units(model, (unit_class,), lambda unit: words.FullyShardedDataParallel(unit, **options))
    return wrapped


def _make_real(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    _fill(module)


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            getattr(tensor, "_local_tensor", tensor).fill_(0.02)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("single", _single, shards=False),
        Contender("DDP", _ddp, shards=False),
        Contender("torch FSDP1 flat", _wrapper(TORCH, original=False)),
        Contender("torch FSDP1 orig", _wrapper(TORCH, original=True)),
        Contender("torch FSDP2", _function(TORCH)),
        Contender("minifsdp flat", _wrapper(OURS, original=False), peer="torch FSDP1 flat"),
        Contender("minifsdp orig", _wrapper(OURS, original=True), peer="torch FSDP1 orig"),
        Contender("minifsdp FSDP2", _function(OURS), peer="torch FSDP2"),
    )
}
