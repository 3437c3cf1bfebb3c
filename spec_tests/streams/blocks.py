"""Four equal blocks on the simulated device, and a log of their training that tests can query.

The blocks are identified by the order of their operators: the forward of block ``i`` is the ``i``-th matrix product of
the forward, and collectives are listed in launch order. So a test can check which operators may overlap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests import subject
from spec_tests.harness import device, simulated
from spec_tests.harness.simulated import WORLD, Operation
from spec_tests.streams.steps import compares

__all__ = ["Block", "Log", "flat", "logged", "model", "per_parameter"]

WIDTH = 8


class Block(nn.Module):
    """A block with one matrix product in forward, so that operators can be attributed to their block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight)


def model(num_blocks: int = 4, width: int = WIDTH) -> nn.Sequential:
    """A chain of blocks on the simulated device."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(num_blocks)]).to(device())


def flat(num_blocks: int = 4, width: int = WIDTH, **options: Any) -> Any:
    """Each block is a unit of the wrapper; the root has no parameters of its own."""
    policy = subject.wrap.ModuleWrapPolicy({Block})
    options = {"device_id": device(), "auto_wrap_policy": policy, **options}
    return subject.FullyShardedDataParallel(model(num_blocks, width), **options)


def per_parameter(num_blocks: int = 4, width: int = WIDTH, shape: tuple[int, ...] | None = None, **options: Any) -> Any:
    """Each block is a unit of `fully_shard`; the root has no parameters of its own."""
    blocks = model(num_blocks, width)
    mesh = init_device_mesh("sim", shape or (torch.distributed.get_world_size(),))
    for block in blocks:
        subject.fully_shard(block, mesh=mesh, **options)
    root = {name: value for name, value in options.items() if name != "reshard_after_forward"}
    return subject.fully_shard(blocks, mesh=mesh, **root)


class Log:
    """The operators of one training step, without the comparison of collectives between ranks.

    Attributes:
        gathers, scatters, reductions: all-gathers, reduce-scatters and all-reduces in launch order.
        products: matrix products in launch order: first those of forward, then those of backward.
        order: which of them NCCL allows to run at the same time.
    """

    def __init__(self, operations: list[Operation]) -> None:
        self.order = simulated.IssueOrder(operations)
        self.operations = operations = [one for one in operations if not compares(one)]
        self.gathers = [o for o in operations if o.name.startswith(("all_gather", "allgather"))]
        self.scatters = [o for o in operations if o.name.startswith("reduce_scatter")]
        self.reductions = [o for o in operations if o.name == "allreduce"]
        self.products = [o for o in operations if o.name in ("mm", "matmul")]

    def on(self, stream: str) -> list[str]:
        """Names of the operators that were launched on a stream."""
        return [o.name for o in self.operations if WORLD.name_of(o.stream) == stream]


def logged(sharded: nn.Module) -> Log:
    """The log of one step, after a step that only records the order of the units."""
    x = torch.randn(3, WIDTH, device=device())
    for _ in range(2):
        WORLD.stops.clear()
        with simulated.Log() as log:
            sharded(x).sum().backward()
            for parameter in sharded.parameters():
                parameter.grad = None
    return Log(log.operations)
