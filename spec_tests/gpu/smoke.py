"""Do both front doors train at all, and as a single process would?

Two ranks, each with a batch of its own, against one process that takes both batches: the same mean of gradients, so
the same parameters after every step, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from spec_tests.gpu.on_ranks import on_ranks
from spec_tests.gpu.platforms import Platform
from spec_tests.harness import device, pool

__all__ = ["own_device", "work"]

LIMIT = 60.0
NUM_STEPS = 3
WIDTH = 32


def work(platform: Platform, num_ranks: int) -> Iterator[dict[str, Any]]:
    """One finding for each front door."""
    for door in DOORS:
        finding = {"door": door, "ranks": num_ranks}
        try:
            distance = max(on_ranks(platform, num_ranks, compare, LIMIT, door=door))
        except pool.Failure as failure:
            yield {**finding, "outcome": "failed", "text": f"{door} on {num_ranks} ranks:\n{failure}"}
        else:
            yield {**finding, "outcome": "passed", "distance": distance}


def compare(door: str) -> float:
    """The largest distance of a parameter from that of a single process; raises where that is no rounding."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    expected = train(model(), lambda step: torch.cat([batch(step, other) for other in range(num_ranks)]))
    found = train(DOORS[door](model()), lambda step: batch(step, rank))
    for step, (mine, single) in enumerate(zip(found, expected, strict=True)):
        for index, (one, other) in enumerate(zip(mine, single, strict=True)):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                distance = float((one - other).abs().max())
                raise AssertionError(
                    f"{door}, step {step}, parameter {index}: as far as {distance:.1e} from that of a single process"
                )
    return max(float((one - other).abs().max()) for one, other in zip(found[-1], expected[-1], strict=True))


def model() -> nn.Module:
    """Three blocks, the same on every rank."""
    torch.manual_seed(1)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1)).to(device())


def batch(step: int, rank: int) -> Tensor:
    """What a rank sees in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, WIDTH, generator=generator).to(device())


def train(trained: nn.Module, batch_of: Callable[[int], Tensor]) -> list[list[Tensor]]:
    """All parameters, whole, after each step."""
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
    after = []
    for step in range(NUM_STEPS):
        trained(batch_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append(whole_parameters(trained))
    return after


def whole_parameters(trained: nn.Module) -> list[Tensor]:
    """Copies, on the CPU."""
    if isinstance(trained, minifsdp.FullyShardedDataParallel):
        with minifsdp.FullyShardedDataParallel.summon_full_params(trained):
            return [parameter.detach().cpu().clone() for parameter in trained.parameters()]
    found = (parameter.detach() for parameter in trained.parameters())
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).cpu().clone() for one in found]


def wrapped(trained: nn.Module) -> nn.Module:
    """By the wrapper: each block is a unit."""
    policy = minifsdp.wrap.ModuleWrapPolicy({nn.Sequential})
    return minifsdp.FullyShardedDataParallel(
        trained, auto_wrap_policy=policy, use_orig_params=True, device_id=own_device()
    )


def own_device() -> torch.device | None:
    """For ``device_id``, which takes a device with an index only: the CPU has none."""
    return device() if device().index is not None else None


def sharded(trained: nn.Module) -> nn.Module:
    """By the function: the same units."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in list(trained.children()):
        minifsdp.fully_shard(block, mesh=mesh)
    return minifsdp.fully_shard(trained, mesh=mesh)


DOORS = {"FullyShardedDataParallel": wrapped, "fully_shard": sharded}
