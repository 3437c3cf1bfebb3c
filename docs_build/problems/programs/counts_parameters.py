"""Prints the number of parameters of a model."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
for layer in model:
    fully_shard(layer)
fully_shard(model)

total = sum(parameter.to_local().numel() for parameter in model.parameters())
print(f"rank {rank}: the model has {total} parameters", flush=True)
dist.barrier()
dist.destroy_process_group()
