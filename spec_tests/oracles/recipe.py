"""A recipe: the length, the optimizer and other settings of a training; and the record of the result.

The numbers of a run depend only on the recipe and on the rank. Batches are drawn from the seed, the step and the rank.
Before each micro-batch, the global generator is seeded from the same three, so dropout draws the same mask on rank 1
and in the single process that simulates rank 1.

There are two ways to accumulate ``g`` over micro-batches 0 and 1 on ranks a and b. They differ in the order of the sums
and therefore in the last bits. Every trainer, including the single process, uses the way that the recipe selects::

    no_sync=True     ((a0 + a1) + (b0 + b1)) / 2            reduced once
    no_sync=False    (a0 + b0) / 2 + (a1 + b1) / 2          reduced in each micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from spec_tests.harness import device
from spec_tests.models import ModelInfo


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, so a wrong gradient affects every later step. `foreach=True` is PyTorch's default on a GPU."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The step size hardly depends on the size of the gradient, so a wrong *scale* of gradients goes unnoticed. Use
    `sgd` as well. The large epsilon keeps rounding errors in tiny gradients from growing into whole steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, weight_decay=0.01, foreach=True)


@dataclass(frozen=True)
class Recipe:
    """The settings of a training.

    Attributes:
        steps: optimizer steps.
        optimizer: creates the optimizer.
        accumulate: micro-batches in each step. The loss of each one is divided by this number.
        no_sync: whether only the last micro-batch of a step reduces gradients.
        seed: seed of the batches and of dropout.
    """

    steps: int = 3
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    accumulate: int = 1
    no_sync: bool = False
    seed: int = 0


USUAL = Recipe()


@dataclass(frozen=True)
class Record:
    """The result of a training run. Everything is on the CPU.

    Attributes:
        losses: shape (micro-batches, ranks): the loss of each rank in each micro-batch of each step, not divided.
        parameters: the full parameters after the last step, by their names in the plain model.
        gradients: the full gradients of the last step, by the same names. Parameters without a gradient are left out.
        buffers: this rank's buffers after the last step, by the same names.
    """

    losses: Tensor
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def forward_backward(
    model: nn.Module, info: ModelInfo, recipe: Recipe, rank: int, step: int, micro_batch: int = 0
) -> Tensor:
    """Runs one micro-batch of one rank: its forwards and its one backward.

    Returns:
        The loss of the micro-batch, detached and not divided by the number of micro-batches.
    """
    index = step * recipe.accumulate + micro_batch
    # For dropout. The batch has its own generator.
    torch.manual_seed((recipe.seed * 4001 + index) * 4001 + rank)
    losses = []
    for forward in range(info.num_forwards):
        args, kwargs = _here(info.batch(recipe.seed, index * info.num_forwards + forward, rank))
        losses.append(info.loss(model(*args, **kwargs)))
    loss = torch.stack(losses).mean()
    (loss / recipe.accumulate).backward()
    return loss.detach()


def _here(batch: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device()), batch)
