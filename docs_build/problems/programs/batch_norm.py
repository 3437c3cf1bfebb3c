"""Trains a model with batch normalization, and prints the buffers of the norm."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
fully_shard(model)

torch.manual_seed(rank)
for _ in range(10):
    model(torch.randn(4, 8)).square().mean().backward()
mean = ", ".join(f"{number:.3f}" for number in model[1].running_mean)
print(f"rank {rank}: the running mean is {mean}", flush=True)
dist.barrier()
dist.destroy_process_group()
