"""The trainers.

All of them run `forward_backward` on the same batches in the same order. They differ in how gradients are averaged, in
how this is deferred during accumulation, and in how the full parameters are collected afterwards. Every rank must call
the distributed trainers. All ranks get the same record, except for ``buffers``.

`train_sharded` takes the API as an argument: the same code trains with torch's and with ours.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spec_tests.harness import device
from spec_tests.models import ModelInfo
from spec_tests.oracles.gathering import clean_name, units_of, wrap_units
from spec_tests.oracles.recipe import USUAL, Recipe, Record, forward_backward
from spec_tests.oracles.single import SingleProcess, copy_all

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
    full: Callable[[Any], tuple[Named, Named]],
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
    parameters, gradients = ({n: t.cpu() for n, t in each.items()} for each in (parameters, gradients))
    return Record(losses.cpu(), parameters, gradients, _buffers(model))


def _buffers(model: nn.Module) -> Named:
    return {clean_name(name): buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers()}


def _plain(model: nn.Module) -> tuple[Named, Named]:
    parameters = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return values, {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def train_ddp(info: ModelInfo, recipe: Recipe = USUAL) -> Record:
    """Trains with `DistributedDataParallel`: every rank stores everything, and gradients are all-reduced."""
    model = info.build().to(device())
    # By default, DDP broadcasts rank 0's running statistics to all ranks, which FSDP does not do.
    ddp = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=info.leaves_some_out)
    record = _train(ddp, info, recipe, ddp.no_sync, lambda _: _plain(model))
    return replace(record, buffers=_buffers(model))


def train_sharded(api: Any, info: ModelInfo, recipe: Recipe = USUAL, **options: Any) -> Record:
    """Trains with an API of FSDP, minifsdp's or torch's. Each unit of the model is sharded, and then the model itself.

    torch's wrapper runs every model on the CPU. In torch 2.13 two cases fail on every device. Use another oracle for
    them:

    * accumulation without ``no_sync`` in a unit of one element (``uneven``): it distinguishes sharded from unsharded
      gradients by their size, which is the same here, and reduces an already reduced gradient again. The result is
      silently wrong;
    * reduction of a unit that ran inside ``no_sync`` but not in the last micro-batch (``sometimes``): it raises.

    Args:
        api: an object of ``spec_tests/models/apis.py``.
        info: the model to train.
        recipe: the settings of the training.
        **options: for ``api.shard``.
    """
    model = api.shard(info.build().to(device()), unit_classes=info.unit_classes, **options)
    return _train(model, info, recipe, lambda: api.no_sync(model), api.values_and_gradients)


def shard_fsdp2(library: Any, info: ModelInfo, **options: Any) -> Any:
    """Applies ``library(unit, **options)`` to each unit of the model, and then to the model itself."""
    model = info.build().to(device())
    return wrap_units(model, info.unit_classes, lambda module: library(module, **options))
