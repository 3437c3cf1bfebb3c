"""Lowers the learning rate if the loss does not improve."""

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
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

torch.manual_seed(rank)
for _ in range(20):
    loss = model((rank + 1) * torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step(loss.item())
print(f"rank {rank}: the learning rate is {scheduler.get_last_lr()[0]:.0e}", flush=True)
dist.barrier()
dist.destroy_process_group()
