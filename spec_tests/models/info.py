"""The description of a model in `MODELS`, and how to add one."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spec_tests.models.modules import seeded

__all__ = ["MODELS", "SAMPLES", "WIDTH", "ModelInfo", "Batch", "dice", "floats", "keep", "tokens"]

Batch = tuple[tuple[Any, ...], dict[str, Any]]
SAMPLES, WIDTH = 4, 8


@dataclass(frozen=True)
class ModelInfo:
    """A model and everything that is needed to train it.

    Attributes:
        name: its key in `MODELS`.
        build: builds the model, with the same values in every process. Does not change the global random state.
        unit_classes: modules of these classes become units, and the model itself becomes the root.
        batch: returns the arguments of ``forward`` for a seed, a step and a rank.
        loss: computes a scalar from the output of ``forward``. It may change the output in place.
        num_forwards: number of forwards before the one backward. Each forward uses the batch of a different step.
        leaves_some_out: whether a parameter may have no gradient after a backward.
    """

    name: str
    build: Callable[[], nn.Module]
    unit_classes: tuple[type[nn.Module], ...]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[Any], Tensor]
    num_forwards: int = 1
    leaves_some_out: bool = False


MODELS: dict[str, ModelInfo] = {}


def dice(seed: int, step: int, rank: int) -> torch.Generator:
    """The random generator for a rank's part of a batch."""
    return torch.Generator().manual_seed((seed * 1009 + step) * 1009 + rank)


def floats(*shape: int, requires_grad: bool = False) -> Callable[[int, int, int], Batch]:
    """Batches that consist of one tensor, normally distributed."""

    def batch(seed: int, step: int, rank: int) -> Batch:
        return (torch.randn(*shape, generator=dice(seed, step, rank)).requires_grad_(requires_grad),), {}

    return batch


def tokens(seed: int, step: int, rank: int) -> Batch:
    """A batch of sequences of five tokens, from a vocabulary of eleven."""
    return (torch.randint(11, (SAMPLES, 5), generator=dice(seed, step, rank)),), {}


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def keep(
    name: str,
    build: Callable[[], nn.Module],
    *unit_classes: type[nn.Module],
    batch: Callable[[int, int, int], Batch] = floats(SAMPLES, WIDTH),  # noqa: B008  # a function, not a value
    loss: Callable[[Any], Tensor] = mean_square,
    **rest: Any,
) -> None:
    """Adds a model to `MODELS`. See `ModelInfo` for the arguments."""

    made = functools.partial(seeded, build, zlib.crc32(name.encode()))
    MODELS[name] = ModelInfo(name, made, unit_classes, batch, loss, **rest)
