"""Whole parameters and gradients by their original names, collected by hand and not by the library under test.

The rules of cutting and joining are in ``spec_tests/oracles/gathering.py``; here they are applied to one wrapped model
at a time, at any moment between two computations. A library that were asked to put its own pieces together again could
be wrong twice and look right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device
from spec_tests.models.modules import MLP, Block, Stack, seeded
from spec_tests.oracles.gathering import clean_name, flat_chunks, gather_chunks, split_by_name, units_of

Named = dict[str, Tensor]
UnitClasses = tuple[type[nn.Module], ...]


def whole(
    model: nn.Module,
    build: Callable[[], nn.Module] = Stack,
    unit_classes: UnitClasses = (Block, MLP),
    *,
    group: Any = None,
) -> tuple[Named, Named]:
    """The full parameters, and the full gradients of those that have one on any rank. Every rank must call it.

    Args:
        model: the wrapped model, ours or torch's, between two computations.
        build: makes the same model unwrapped.
        unit_classes: which of its modules were wrapped, apart from the model itself.
        group: those who share; ``"nobody"`` if every rank has everything.
    """
    sharers = None if group == "nobody" else (group or dist.group.WORLD)
    found = split_by_name(gather_chunks(flat_chunks(model), sharers), units_of(seeded(build), unit_classes))
    values, gradients = ({name: tensor.to(device()) for name, tensor in tensors.items()} for tensors in found)
    return values, gradients


def group_of(strategy: Any) -> str | None:
    """What to tell `whole` about those who share, by the strategy's name."""
    return "nobody" if strategy.name == "NO_SHARD" else None


def by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters, ours or torch's, by the names that they had before wrapping."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def memory_of(tensor: Tensor) -> int:
    """The address of the storage that a tensor looks into."""
    return tensor.untyped_storage().data_ptr()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, run: Callable[[nn.Module, int], Any]) -> None:
    """``steps`` steps of a loop as it is usually written."""
    for step in range(steps):
        optimizer.zero_grad()
        run(model, step)
        optimizer.step()
