"""A model built on the meta device, with a hybrid strategy, activation checkpointing and saved checkpoints."""

import functools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

WIDTH, BATCH, STEPS = 10, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return x + self.scale * self.layers(x)


def initialise(module, device):
    module.to_empty(device=device, recurse=False)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)
        nn.init.zeros_(module.bias)
    if isinstance(module, Block):
        module.scale.fill_(0.5)


def build(device):
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        param_init_fn=functools.partial(initialise, device=device),
        sync_module_states=True,
        device_id=device,
    )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: isinstance(module, Block),
    )
    return model


def train(model, steps, device, report):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        dice = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, WIDTH, generator=dice), torch.randn(BATCH, 2, generator=dice)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rank::world_size].to(device)), y[rank::world_size].to(device))
        loss.backward()
        report["norms"].append(model.clip_grad_norm_(2.0).item())
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        report["losses"].append(mean.item() / world_size)


def main(device):
    rank = dist.get_rank()
    folder = os.environ.get("CHECKPOINTS", "checkpoint")
    report = {"losses": [], "norms": []}

    # All ranks use rank 0's values, even though each rank has a different seed.
    torch.manual_seed(rank)
    model = build(device)
    train(model, range(STEPS // 2), device, report)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)

    torch.manual_seed(100 + rank)
    model = build(device)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    train(model, range(STEPS // 2, STEPS), device, report)

    with FSDP.summon_full_params(model, writeback=False):
        report["weights"] = [p.double().abs().sum().item() for p in model.parameters()]
        report["buffers"] = [b.item() for b in model.buffers()]
    return report
