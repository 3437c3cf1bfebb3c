"""Shards a model with a unit for each layer."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

fully_shard(model)
for layer in model:
    fully_shard(layer)
model(torch.randn(4, 8)).square().mean().backward()
print(f"rank {rank}: done", flush=True)
