"""Trains a model with each API, saves, loads, and prints the losses. `test_no_checks.py` runs it on two ranks."""

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel, fully_shard
from minifsdp.engine.events import events, issue
from minifsdp.watchdog import process


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def train(model: nn.Module) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        loss = model(torch.randn(2, 4, generator=generator)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


dist.init_process_group("gloo")
function = build()
for layer in (function[0], function[2], function):
    fully_shard(layer)
wrapped = FullyShardedDataParallel(build(), device_id=torch.device("cpu"))
losses = [train(function), train(wrapped)]
wrapped.load_state_dict(wrapped.state_dict())
function.load_state_dict(function.state_dict())
observers = [
    events.collective,
    *events.roots,
    *events.optimizers,
    process.log.watchdog,
    events.barrier,
    *events.before_state_dict,
]
num_observers = sum(observer not in (None, issue) for observer in observers)
print(losses, "groups in the log:", len(process.log.sequences), "observers:", num_observers, flush=True)
dist.destroy_process_group()
