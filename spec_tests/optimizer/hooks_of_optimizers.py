"""A program that prints, at each stage, whether the hook for optimizer steps is installed.

It needs its own process: other tests leave units in the worker processes, and the hook stays while a unit is alive.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as torch_optimizer

from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, fully_shard


def num_hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


def wrapped(model: nn.Module) -> Any:
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, **options)


def main() -> None:
    dist.init_process_group("gloo")
    print("before", num_hooks())
    for make in (fully_shard, wrapped):
        first, second = make(nn.Linear(4, 4)), make(nn.Linear(4, 4))
        for model in (first, second):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            del optimizer
        print("two models", num_hooks())
        del first, model
        gc.collect()
        print("one model", num_hooks())
        del second
        gc.collect()
        print("no model", num_hooks())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
