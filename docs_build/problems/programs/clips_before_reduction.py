"""Accumulates two micro-batches, and clips the gradient of each."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with model.no_sync():
    model(torch.randn(4, 8)).square().mean().backward()
    norm = model.clip_grad_norm_(1.0)
model(torch.randn(4, 8)).square().mean().backward()
norm = model.clip_grad_norm_(1.0)
optimizer.step()
print(f"rank {rank}: norm {norm.item():.3f}", flush=True)
