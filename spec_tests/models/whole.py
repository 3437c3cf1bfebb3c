"""Unsharded parameters and gradients by their original names, and comparisons with an unwrapped model.

`whole` collects them without the library under test, at any time between two computations. If the library joined its
own shards, a mistake in the split and the same mistake in the join could cancel out.
``spec_tests/oracles/gathering.py`` has the rules for splitting and joining.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device
from spec_tests.models.modules import MLP, Block, Stack, seeded
from spec_tests.models.running import iterate
from spec_tests.models.values import assert_same, full_values, mean_gradients, named
from spec_tests.oracles.gathering import flat_chunks, gather_chunks, split_by_name, units_of
from spec_tests.subject import FullyShardedDataParallel

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


def odd() -> Stack:
    """Units of 71, 34, 47 and 60 elements and a root of 56: on two, three or four ranks, some unit needs padding."""
    model = Stack(hidden=(5, 2, 3, 4))
    model.blocks[0].down.bias = None
    model.blocks[1].up.bias = None
    return model


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def assert_a_step_uses_the_mean_gradient_alone(model: FullyShardedDataParallel, plain: nn.Module) -> None:
    """Runs one iteration and one step, and compares the parameters with those of the unwrapped model."""
    iterate(model)
    assert_step_moves_by(model, plain, mean_gradients(plain))


def assert_step_moves_by(model: FullyShardedDataParallel, plain: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Checks the gradients of the model, whose parameters equal those of ``plain``, by a step of SGD."""
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert_same(full_values(model), {name: value - gradients[name] for name, value in named(plain).items()})
