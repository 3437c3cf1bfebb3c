"""Trains the same model in float32 and in bfloat16, and counts the weights that have changed."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)

for dtype in (torch.float32, torch.bfloat16):
    model = fully_shard(nn.Linear(32, 32, dtype=dtype))
    before = model.weight.full_tensor().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 32, dtype=dtype)).square().mean().backward()
        optimizer.step()
    changed = (model.weight.full_tensor() != before).sum().item()
    print(f"rank {rank}: {changed} of {before.numel()} weights have changed in {dtype}", flush=True)
dist.barrier()
dist.destroy_process_group()
