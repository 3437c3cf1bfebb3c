"""The same training twice, with ranks delayed at different places: the results are bitwise equal."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models.modules import MLP
from spec_tests.subject import ModuleWrapPolicy

NUM_STEPS = 3
LONGEST_DELAY = 0.01  # seconds


class Delayed(MLP):
    """Sleeps in forward and in backward, for times drawn from this rank's generator."""

    delays = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        self.wait()
        result = super().forward(x)
        result.register_hook(self.wait)
        return result

    def wait(self, *_: Tensor) -> None:
        time.sleep(self.delays.uniform(0.0, LONGEST_DELAY))


def trained(api: str, strategy: str, seed: int) -> list[Tensor]:
    """This rank's shards after a few steps; ``seed`` changes only the delays."""
    rank = dist.get_rank()
    Delayed.delays = random.Random(100 * seed + rank)
    torch.manual_seed(0)
    model = nn.Sequential(*(Delayed(16, 32) for _ in range(4))).to(device())
    mesh = None
    if strategy == "HYBRID_SHARD":
        mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    if api == "fully_shard":
        for module in model:
            subject.fully_shard(module, mesh=mesh)
        subject.fully_shard(model, mesh=mesh)
    else:
        model = subject.FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=subject.ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Delayed}),
            device_id=device(),
        )
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        drawn = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        # The bits of a sum of these values depend on the order of the summands.
        model((drawn * 3.0**rank).to(device())).square().sum().backward()
        optimizer.step()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


@pytest.mark.spec("WIRE-02")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("api", ["FullyShardedDataParallel", "fully_shard"])
@ranks(4)
def test_training_on_four_ranks_is_bitwise_equal_for_any_delays(api: str, strategy: str) -> None:
    first, second = trained(api, strategy, 1), trained(api, strategy, 2)
    assert all(map(torch.equal, first, second))
    assert any(shard.count_nonzero() for shard in first)
