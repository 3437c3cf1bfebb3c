"""Trains each rank on its own batch until the loss is small."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)
model = fully_shard(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = (rank + 1) * torch.randn(4, 8)

for step in range(100):
    loss = model(x).square().mean()
    if loss < 0.3:
        print(f"rank {rank} stops after {step} steps", flush=True)
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    print(model(torch.ones(1, 8)).mean().item(), flush=True)
