"""The trainers.

All of them run `forward_backward` on the same batches in the same order. They differ in how gradients are averaged, in
how this is deferred during accumulation, and in how the full parameters are collected afterwards. Every rank must call
the distributed trainers. All ranks get the same record, except for ``buffers``.

`train_fsdp1` and `train_fsdp2` take the library as an argument: the same code trains with torch's and with ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from spec_tests.harness import device
from spec_tests.models import ModelInfo
from spec_tests.oracles.gathering import clean_name, flat_chunks, gather_chunks, split_by_name, units_of, wrap_units
from spec_tests.oracles.recipe import USUAL, Recipe, Record, forward_backward
from spec_tests.oracles.single import SingleProcess, copy_all

__all__ = [
    "shard_fsdp1",
    "shard_fsdp2",
    "train_ddp",
    "train_fsdp1",
    "train_fsdp2",
    "train_single",
    "train_torch_fsdp1",
    "train_torch_fsdp2",
]

Named = dict[str, Tensor]


# --- one process ---


@functools.lru_cache(maxsize=64)  # Consecutive tests use the same record, and none changes it.
def train_single(info: ModelInfo, world_size: int, recipe: Recipe = USUAL, *, flat_units: bool = False) -> Record:
    """Trains in a single process that simulates all ranks in turn. Needs no process group.

    Args:
        info: the model to train.
        world_size: number of ranks to simulate.
        recipe: the settings of the training.
        flat_units: whether a parameter without a gradient gets a zero gradient if its unit has any gradient. This is
            the case with one flat parameter per unit, and it makes a difference to the optimizer.

    Returns:
        The record; its buffers are those of rank 0.
    """
    model = info.build().to(device())
    single = SingleProcess(model, world_size, units_of(model, info.unit_classes))
    optimizer = recipe.optimizer(model.parameters())
    losses: list[Tensor] = []
    together = [list(range(recipe.accumulate))] if recipe.no_sync else [[i] for i in range(recipe.accumulate)]
    gradients: Named = {}
    for step in range(recipe.steps):
        optimizer.zero_grad()
        for micro_batches in together:
            of_ranks = []
            for rank in range(world_size):
                with single.as_rank(rank) as here:
                    of_ranks.append([forward_backward(here, info, recipe, rank, step, i) for i in micro_batches])
            losses.extend(torch.stack(row) for row in zip(*of_ranks, strict=True))
            single.reduce()
        if flat_units:
            single.fill_up()
        gradients = _plain(model)[1]
        optimizer.step()
    copy_all(single.buffers[0], model.buffers())
    return _record(model, torch.stack(losses), _plain(model)[0], gradients)


# --- several processes ---


def _train(
    model: nn.Module,
    info: ModelInfo,
    recipe: Recipe,
    no_sync: Callable[[], AbstractContextManager[Any]],
    full: Callable[[nn.Module], tuple[Named, Named]],
) -> Record:
    """The loop that the distributed trainers share. ``full`` returns the full parameters and gradients."""
    optimizer = recipe.optimizer(model.parameters())
    losses = []
    gradients: Named = {}
    for step in range(recipe.steps):
        optimizer.zero_grad()
        for i in range(recipe.accumulate):
            puts_off = recipe.no_sync and i < recipe.accumulate - 1
            with no_sync() if puts_off else contextlib.nullcontext():
                losses.append(forward_backward(model, info, recipe, dist.get_rank(), step, i))
        if step == recipe.steps - 1:
            # Before the step, because an optimizer may change gradients.
            gradients = full(model)[1]
        optimizer.step()
    mine = torch.stack(losses)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    return _record(model, torch.stack(of_ranks, dim=1), full(model)[0], gradients)


def _record(model: nn.Module, losses: Tensor, parameters: Named, gradients: Named) -> Record:
    return Record(losses.cpu(), parameters, gradients, _buffers(model))


def _buffers(model: nn.Module) -> Named:
    return {clean_name(name): buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers()}


def _plain(model: nn.Module) -> tuple[Named, Named]:
    values, gradients = {}, {}
    for name, parameter in model.named_parameters():
        values[clean_name(name)] = parameter.detach().to("cpu", copy=True)
        if parameter.grad is not None:
            gradients[clean_name(name)] = parameter.grad.to("cpu", copy=True)
    return values, gradients


def train_ddp(info: ModelInfo, recipe: Recipe = USUAL) -> Record:
    """Trains with `DistributedDataParallel`: every rank stores everything, and gradients are all-reduced."""
    model = info.build().to(device())
    # By default, DDP broadcasts rank 0's running statistics to all ranks, which FSDP does not do.
    ddp = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=info.leaves_some_out)
    record = _train(ddp, info, recipe, ddp.no_sync, lambda _: _plain(model))
    return replace(record, buffers=_buffers(model))


def train_torch_fsdp1(info: ModelInfo, recipe: Recipe = USUAL, **options: Any) -> Record:
    """Trains with torch's `FullyShardedDataParallel`; see `train_fsdp1`.

    It runs every model on the CPU. In torch 2.13 two cases fail on every device. Use another oracle for them:

    * accumulation without ``no_sync`` in a unit of one element (``uneven``): it distinguishes sharded from unsharded
      gradients by their size, which is the same here, and reduces an already reduced gradient again. The result is
      silently wrong;
    * reduction of a unit that ran inside ``no_sync`` but not in the last micro-batch (``sometimes``): it raises.
    """
    return train_fsdp1(torch_fsdp.FullyShardedDataParallel, info, recipe, **options)


def train_fsdp1(library: Any, info: ModelInfo, recipe: Recipe = USUAL, **options: Any) -> Record:
    """Trains with a wrapper of the FSDP1 kind. Each unit is wrapped manually.

    Args:
        library: the class ``FullyShardedDataParallel``, torch's or ours.
        info: the model to train.
        recipe: the settings of the training.
        **options: for the constructor, as described in `shard_fsdp1`.
    """
    units = units_of(info.build(), info.unit_classes)
    group = _shard_group(options)

    def full(model: nn.Module) -> tuple[Named, Named]:
        return split_by_name(gather_chunks(flat_chunks(model), group), units)

    model = shard_fsdp1(library, info, **options)
    return _train(model, info, recipe, model.no_sync, full)


def shard_fsdp1(library: Any, info: ModelInfo, **options: Any) -> Any:
    """Wraps each unit of the model, and then the model itself.

    Args:
        library: the class ``FullyShardedDataParallel``, torch's or ours.
        info: the model to wrap.
        **options: for the constructor. Since each library has its own enums and dataclasses, ``sharding_strategy`` and
            ``backward_prefetch`` may be given by the name of a member, and ``mixed_precision`` as a dictionary.
    """
    chosen = {"device_id": device(), **_in_words_of(library, options)}
    with warnings.catch_warnings():
        # Ignore deprecation warnings about NO_SHARD and FSDP1, which are not the subject of this comparison.
        warnings.simplefilter("ignore")
        return wrap_units(info.build(), info.unit_classes, lambda module: library(module, **chosen))


def _in_words_of(library: Any, options: dict[str, Any]) -> dict[str, Any]:
    words = importlib.import_module("torch.distributed.fsdp" if library.__module__.startswith("torch.") else "minifsdp")
    translated = dict(options)
    for option, enum in (("sharding_strategy", "ShardingStrategy"), ("backward_prefetch", "BackwardPrefetch")):
        if isinstance(options.get(option), str):
            translated[option] = getattr(words, enum)[options[option]]
    if isinstance(options.get("mixed_precision"), dict):
        translated["mixed_precision"] = words.MixedPrecision(**options["mixed_precision"])
    return translated


def _shard_group(options: dict[str, Any]) -> dist.ProcessGroup | None:
    strategy = options.get("sharding_strategy")
    if getattr(strategy, "name", strategy) == "NO_SHARD":
        return None
    group = options.get("process_group") or dist.group.WORLD
    return group[0] if isinstance(group, tuple) else group


def train_torch_fsdp2(info: ModelInfo, recipe: Recipe = USUAL, **options: Any) -> Record:
    """Trains with torch's `fully_shard`; see `train_fsdp2`."""
    return train_fsdp2(torch_fsdp.fully_shard, info, recipe, **options)


def train_fsdp2(library: Any, info: ModelInfo, recipe: Recipe = USUAL, **options: Any) -> Record:
    """Trains with a function of the FSDP2 kind, which is applied to each unit and to the model.

    Args:
        library: the function ``fully_shard``, torch's or ours.
        info: the model to train.
        recipe: the settings of the training.
        **options: for the function.
    """
    model = shard_fsdp2(library, info, **options)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return _train(model, info, recipe, no_sync, lambda _: _joined(model))


def shard_fsdp2(library: Any, info: ModelInfo, **options: Any) -> Any:
    """Applies ``library(unit, **options)`` to each unit of the model, and then to the model itself."""
    model = info.build().to(device())
    return wrap_units(model, info.unit_classes, lambda module: library(module, **options))


def _joined(model: nn.Module) -> tuple[Named, Named]:
    """Full values and gradients from dim-0 shards. Concatenated, the shards have all elements in their order."""
    values, gradients = _plain(model)
    chunks = {
        name: (_local_row(value), _local_row(gradients[name]) if name in gradients else None)
        for name, value in values.items()
        if isinstance(value, DTensor)
    }
    mesh = next(value.device_mesh for value in values.values() if isinstance(value, DTensor))
    for name, (value, gradient) in gather_chunks(chunks, mesh.get_group(mesh.ndim - 1)).items():
        values[name] = value.view(values[name].shape)
        if gradient is not None:
            gradients[name] = gradient.view(values[name].shape)
    return values, gradients


def _local_row(tensor: Any) -> Tensor:
    assert tensor.placements[-1] == Shard(0), tensor.placements
    row: Tensor = tensor.to_local().reshape(-1)
    return row
