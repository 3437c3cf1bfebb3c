"""A step of the model of ``small.py`` on ranks that communicate with gloo. Rank 0 prints its events.

Its arguments are the API and the strategy.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullyShardedDataParallel, fully_shard, trace
from minifsdp.api import ShardingStrategy
from minifsdp.wrap import ModuleWrapPolicy
from spec_tests.simulate.small import KINDS, WIDTH, Pair, tower_module


def main(api: str, strategy: str) -> None:
    dist.init_process_group("gloo")
    num, mesh = dist.get_world_size(), None
    if "HYBRID" in strategy:
        mesh = init_device_mesh("cpu", (2, num // 2), mesh_dim_names=("replicate", "shard"))
    model: Any = tower_module()
    if api == "fsdp1":
        sharded: Any = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Pair}),
            use_orig_params=True,
        )
    else:
        for unit in model:
            fully_shard(unit, mesh=mesh, reshard_after_forward=strategy in ("FULL_SHARD", "HYBRID_SHARD"))
        sharded = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for _ in range(2):
        with trace.record() as recorder:
            sharded(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(json.dumps(recorder.order(*KINDS)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
