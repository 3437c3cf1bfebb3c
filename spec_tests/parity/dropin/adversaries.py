"""Trains two models with two optimizers. A closure runs a step's last micro-batch. A third model averages weights."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

NOISE, WIDTH, SIZE, ROUNDS, MICRO_BATCHES = 4, 9, 6, 5, 3


def generator():
    return nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, SIZE))


def critic():
    return nn.Sequential(nn.Linear(SIZE, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))


def wrapped(model, device):
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=device)


def judge(verdicts, truth):
    return F.binary_cross_entropy_with_logits(verdicts, torch.full_like(verdicts, truth)) / MICRO_BATCHES


def accumulated_step(model, optimizer, loss_of, batches):
    """Runs all micro-batches except the last without communication. The optimizer runs the last one in its closure."""
    optimizer.zero_grad()
    with model.no_sync():
        for batch in batches[:-1]:
            loss_of(batch).backward()

    def closure():
        loss = loss_of(batches[-1])
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def full_state(model):
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        return {name: value.double().sum().item() for name, value in model.state_dict().items()}


def main(device):
    torch.manual_seed(0)
    plain = generator()
    maker, average = wrapped(plain, device), wrapped(generator(), device)
    judging = wrapped(critic(), device)
    average.load_state_dict(maker.state_dict())
    average.requires_grad_(False)
    make_better = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.9))
    judge_better = torch.optim.Adam(judging.parameters(), lr=1e-2, betas=(0.5, 0.9))

    def loss_of_judge(batch):
        real, noise = batch
        return judge(judging(real), 1.0) + judge(judging(maker(noise).detach()), 0.0)

    def loss_of_maker(batch):
        return judge(judging(maker(batch[1])), 1.0)

    report = {"judge": [], "maker": [], "average": []}
    dice = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(ROUNDS):
        batches = [
            (torch.randn(3, SIZE, generator=dice).to(device), torch.randn(3, NOISE, generator=dice).to(device))
            for _ in range(MICRO_BATCHES)
        ]
        report["judge"].append(accumulated_step(judging, judge_better, loss_of_judge, batches))
        report["maker"].append(accumulated_step(maker, make_better, loss_of_maker, batches))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), maker.parameters(), strict=True):
                mean.lerp_(value, 0.3)
            report["average"].append(average(batches[0][1]).sum().item())
    report["states"] = [full_state(model) for model in (maker, average, judging)]
    return report
