"""A model whose units are large enough to measure the memory of a checkpoint, with either API."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spec_tests.harness import device
from spec_tests.models.modules import seeded
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, fully_shard
from spec_tools.processes.checkpoint_sizes import Checkpoint

# With 8 ranks, a shard of a block has 256 KiB. Shards of this size are received directly in the output of the
# all-gather. For smaller ones, gloo allocates another output.
WIDTH = 512
APIS = ("flat", "original", "fully_shard")


class Pair(nn.Sequential):
    """A unit of two matrices. If both were unsharded while rows are loaded, the memory would be twice as large."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


class Tall(nn.Module):
    """Four equal blocks, and a head with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Pair() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def checkpoint(num_ranks: int) -> Checkpoint:
    """The formulas for the checkpoint of the model and its Adam."""
    with torch.device("meta"):
        model = Tall()
    shapes = [[parameter.shape for parameter in unit.parameters()] for unit in (*model.blocks, model.head)]
    return Checkpoint(shapes, num_ranks)


def trained(api: str, group: dist.ProcessGroup | None = None) -> tuple[Any, torch.optim.Optimizer]:
    """The sharded model and its optimizer after a step with the same batch on all ranks."""
    model = seeded(Tall)
    if api == "fully_shard":
        mesh = None if group is None else DeviceMesh.from_group(group, device().type)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        policy, keep = ModuleWrapPolicy({Pair}), api == "original"
        model = FullyShardedDataParallel(model, group, auto_wrap_policy=policy, use_orig_params=keep)
    # Without `foreach`, a step needs no memory for all parameters at once.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    dice = torch.Generator().manual_seed(0)
    model(torch.randn(2, WIDTH, generator=dice).to(device())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
