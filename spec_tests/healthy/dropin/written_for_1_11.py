"""A training script from spring 2022, when the wrapper was new and some names were different."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import default_auto_wrap_policy

BATCH, STEPS = 8, 4


def only_linears(module, recurse, unwrapped_params, smallest):
    """A policy with the signature of PyTorch 1.11."""
    return recurse or (isinstance(module, nn.Linear) and unwrapped_params >= smallest)


def build():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def train(model, device, report):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        dice = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, 6, generator=dice), torch.randn(BATCH, 2, generator=dice)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rank::world_size].to(device)), y[rank::world_size].to(device))
        loss.backward()
        report["with a gradient"].append(len(model.params_with_grad) > 0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        report["losses"].append(mean.item() / world_size)


def main(device):
    report = {"losses": [], "with a gradient": []}

    by_size = functools.partial(default_auto_wrap_policy, min_num_params=100)
    by_class = functools.partial(only_linears, smallest=100)
    for policy in (by_size, by_class):
        torch.manual_seed(0)
        model = FSDP(build().to(device), fsdp_auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True))
        train(model, device, report)
    report["weights"] = {name: value.double().abs().sum().item() for name, value in model.state_dict().items()}
    return report
