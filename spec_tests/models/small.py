"""A sharded `chain` of blocks, its units, and one iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.engine.unit import Unit
from spec_tests.harness import device
from spec_tests.models.running import batch
from spec_tests.subject import FullyShardedDataParallel as FSDP

Loss = Callable[[nn.Module, int], Tensor]


def shard_each(model: nn.Module, **options: Any) -> FSDP:
    """Shards the model: each child becomes a unit, and the model itself becomes the root."""
    for name, child in list(model.named_children()):
        setattr(model, name, FSDP(child, device_id=device(), **options))
    return FSDP(model, device_id=device(), **options)


def draw(rank: int, step: int = 0) -> Tensor:
    """One rank's part of the batch of a step. It differs between ranks and between steps."""
    return batch(step, rank, width=3)


def square_loss(model: nn.Module, rank: int) -> Tensor:
    """Runs one forward and returns a loss."""
    return model(draw(rank)).square().mean()


def units_of(model: FSDP) -> list[Unit]:
    """All units of a wrapped model, outer ones first."""
    return [wrapper._unit for wrapper in FSDP.fsdp_modules(model) if wrapper._unit is not None]


def train_once(model: FSDP, loss: Loss = square_loss) -> None:
    """Runs one forward and backward with this rank's part of the batch."""
    loss(model, dist.get_rank()).backward()
