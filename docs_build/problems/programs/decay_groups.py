"""Excludes biases and norms from weight decay."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10)))

decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
print(f"rank {rank}: {len(decay)} parameters with weight decay, {len(others)} without", flush=True)
dist.barrier()
dist.destroy_process_group()
