"""Accumulates the gradient of a batch in parts, and compares it with the gradient of the batch."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(8, 1)
batch = torch.randn(8, 8)
model(batch).square().mean().backward()
expected = model.weight.grad.norm().item()
model.zero_grad()

fully_shard(model)
for part in batch.chunk(4):
    model(part).square().mean().backward()
found = model.weight.grad.full_tensor().norm().item()
print(f"rank {rank}: the norm of the gradient is {found:.3f}, expected {expected:.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
