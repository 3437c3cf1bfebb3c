"""Trains a wrapper and a ``fully_shard`` model without ``/proc``, signals and forks, and one process for comparison."""

import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel, fully_shard
from minifsdp.watchdog import linux


def fail(*args: Any, **kwargs: Any) -> NoReturn:
    raise OSError("this system does not have it")


dist.init_process_group("gloo")
linux.SYSTEM = Path("/proc-of-linux")
for name in ("signal", "set_wakeup_fd", "pthread_kill", "setitimer"):
    setattr(signal, name, fail)
for name in ("fork", "kill", "register_at_fork", "eventfd", "wait"):
    setattr(os, name, fail)

for shard in (lambda model: model, fully_shard, FullyShardedDataParallel):
    torch.manual_seed(0)
    model = shard(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.5f}")
    if dist.get_rank() == 0:
        print("losses", *losses, flush=True)
dist.destroy_process_group()
