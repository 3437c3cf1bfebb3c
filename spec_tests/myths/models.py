"""The model of the demonstrations: two equal blocks and a small last layer that belongs to the root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel, fully_shard
from minifsdp.wrap import ModuleWrapPolicy
from spec_tests.harness import device

__all__ = ["Block", "Net", "batch", "net", "sharded", "step", "wrapped"]


class Block(nn.Module):
    """72 parameters: a weight of 8 x 8 and a bias of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Two blocks, and a last layer of 8 to 2."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


def net() -> Net:
    """With the same values on every rank."""
    torch.manual_seed(0)
    return Net().to(device())


def wrapped(**options: Any) -> FullyShardedDataParallel:
    """Through the first door, each block a unit."""
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": device(), **options}
    return FullyShardedDataParallel(net(), **options)


def sharded(**options: Any) -> Any:
    """Through the second door, each block a unit."""
    model = net()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(seed: int = 0, rows: int = 4) -> Tensor:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(rows, 8, generator=generator).to(device())


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, loss: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Forward, backward and, with an optimizer, its step; returns the output."""
    output = model(batch())
    (loss or (lambda out: out.square().mean()))(output).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return output
