"""Checks that both front ends train, with the same results as a single process.

Two ranks, each with a batch of its own, are compared with one process that uses both batches. The mean of the gradients
is the same, so the parameters after every step are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, pool
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.sharding import sharded, wrapped
from spec_tests.models.values import full_values
from spec_tools.gpu.on_ranks import on_ranks
from spec_tools.gpu.platforms import Platform

__all__ = ["compare_model", "own_device", "work"]

LIMIT = 60.0
NUM_STEPS = 3


def work(platform: Platform, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yields one finding for each front end."""
    for api in APIS:
        finding = {"api": api, "ranks": num_ranks}
        try:
            distance = max(on_ranks(platform, num_ranks, compare, LIMIT, api=api))
        except pool.Failure as failure:
            yield {**finding, "outcome": "failed", "text": f"{api} on {num_ranks} ranks:\n{failure}"}
        else:
            yield {**finding, "outcome": "passed", "distance": distance}


def compare(api: str) -> float:
    """`compare_model` for one of `APIS`."""
    return compare_model(api, APIS[api])


def compare_model(api: str, build: Callable[[], nn.Module]) -> float:
    """The largest difference from a parameter of a single process; raises if it is larger than a rounding error.

    Args:
        api: the name of the model in messages.
        build: builds the model of `seeded`, sharded.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    expected = train(seeded(), lambda step: torch.cat([batch(step, other) for other in range(num_ranks)]))
    found = train(build(), lambda step: batch(step, rank))
    for step, (mine, single) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == single.keys()
        for name, one in mine.items():
            if not torch.allclose(one, single[name], rtol=1e-4, atol=1e-5):
                distance = float((one - single[name]).abs().max())
                raise AssertionError(
                    f"{api}, step {step}, {name}: as far as {distance:.1e} from that of a single process"
                )
    return max(float((one - expected[-1][name]).abs().max()) for name, one in found[-1].items())


def train(trained: nn.Module, batch_of: Callable[[int], Tensor]) -> list[dict[str, Tensor]]:
    """Trains; returns all unsharded parameters after each step."""
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    after = []
    for step in range(NUM_STEPS):
        loss_of(trained(batch_of(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append(full_values(trained))
    return after


def own_device() -> torch.device | None:
    """The value for ``device_id``, which needs a device with an index; ``None`` for the CPU, which has no index."""
    return device() if device().index is not None else None


APIS: dict[str, Callable[[], nn.Module]] = {
    # torch needs a device for its FSDP1, the CPU too.
    "FullyShardedDataParallel": lambda: wrapped(use_orig_params=True, device_id=device()),
    "fully_shard": sharded,
}
