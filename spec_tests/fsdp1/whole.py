"""Unsharded parameters and gradients by their original names, collected without the library under test.

``spec_tests/oracles/gathering.py`` has the rules for splitting and joining. This module applies them to one wrapped
model, at any time between two computations. If the library under test joined its own shards, a mistake in the split
and the same mistake in the join could cancel out.
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
    """The unsharded parameters, and the unsharded gradients that exist on at least one rank. Every rank must call it.

    Args:
        model: the wrapped model, of minifsdp or torch, between two computations.
        build: builds the same model unwrapped.
        unit_classes: the classes of modules that were wrapped, in addition to the model itself.
        group: the process group that shards the model; ``"nobody"`` if nothing is sharded.
    """
    sharers = None if group == "nobody" else (group or dist.group.WORLD)
    found = split_by_name(gather_chunks(flat_chunks(model), sharers), units_of(seeded(build), unit_classes))
    values, gradients = ({name: tensor.to(device()) for name, tensor in tensors.items()} for tensors in found)
    return values, gradients


def group_of(strategy: Any) -> str | None:
    """The ``group`` argument of `whole` for a strategy, chosen by the strategy's name."""
    return "nobody" if strategy.name == "NO_SHARD" else None


def by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a minifsdp or torch model, by their names before wrapping."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, run: Callable[[nn.Module, int], Any]) -> None:
    """A standard training loop of ``steps`` steps."""
    for step in range(steps):
        optimizer.zero_grad()
        run(model, step)
        optimizer.step()
