"""Parameters on the CPU, an exponential moving average of the weights, and a checkpoint in the middle."""

import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

BATCH, STEPS, DECAY = 8, 6, 0.9


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)]
    return nn.Sequential(*layers)


def wrap(model, device):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
    return FSDP(model, auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True), device_id=device)


def batch_of(step, rank, world_size, device):
    dice = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 6, generator=dice), torch.randn(BATCH, 3, generator=dice)
    return x[rank::world_size].to(device), y[rank::world_size].to(device)


@torch.no_grad()
def update_average(average, model):
    with FSDP.summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            average.setdefault(name, parameter.detach().cpu().clone()).lerp_(parameter.cpu(), 1 - DECAY)


def save(model, path):
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def train(model, steps, device, report, average):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        x, y = batch_of(step, dist.get_rank(), dist.get_world_size(), device)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        report["norms"].append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        update_average(average, model)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        report["losses"].append(mean.item() / dist.get_world_size())


def main(device):
    path = os.path.join(os.environ.get("CHECKPOINTS", "."), "model.pt")
    report, average = {"losses": [], "norms": []}, {}

    model = wrap(build(), device)
    train(model, range(STEPS // 2), device, report, average)
    save(model, path)

    # Restart: load the checkpoint into a new model before wrapping it.
    plain = build()
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    plain.load_state_dict(torch.load(path, weights_only=True))
    model = wrap(plain, device)
    train(model, range(STEPS // 2, STEPS), device, report, average)

    # Also load a checkpoint after wrapping, on all ranks. This must not change the result.
    save(model, path)
    model.load_state_dict(torch.load(path, weights_only=True))
    with FSDP.summon_full_params(model, writeback=False):
        report["weights"] = {name: p.double().abs().sum().item() for name, p in model.named_parameters()}
    report["averages"] = {name: p.double().abs().sum().item() for name, p in average.items()}
    return report
