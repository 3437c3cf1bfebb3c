"""A training script from late 2022: positional arguments, older imports, older optimizer checkpoints."""

import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy, wrap

STEPS = 4


class Model(nn.Module):
    """Wraps some of its submodules in its constructor."""

    def __init__(self):
        super().__init__()
        self.enter = wrap(nn.Linear(7, 9))
        self.middle = wrap(nn.Sequential(nn.ReLU(), nn.Linear(9, 9)), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        self.leave = nn.Linear(9, 2)

    def forward(self, x):
        return self.leave(self.middle(self.enter(x)))


def by_hand(device):
    with enable_wrap(wrapper_cls=FSDP, device_id=device):
        return wrap(Model())


def layers():
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2))


def by_size(device):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=60)
    precision = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
    # The argument order of 1.13: group, strategy, offload, policy, prefetch, precision, ignored, init, device.
    strategy, prefetch = ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_POST
    return FSDP(layers(), None, strategy, CPUOffload(False), policy, prefetch, precision, None, None, device)


def step_of(model, optimizer, seed, device):
    dice = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    x, y = torch.randn(5, 7, generator=dice).to(device), torch.randn(5, 2, generator=dice).to(device)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    norm = model.clip_grad_norm_(1.0, norm_type=2)
    optimizer.step()
    return [loss.item(), norm.item()]


def main(device):
    rank = dist.get_rank()
    path = os.path.join(os.environ.get("CHECKPOINTS", "."), "checkpoint.pt")
    report = {}

    for name, build, plain in (("by hand", by_hand, Model), ("by size", by_size, layers)):
        torch.manual_seed(0)
        model = build(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        first = [step_of(model, optimizer, seed, device) for seed in range(STEPS)]

        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
            weights = model.state_dict()
        moments = FSDP.full_optim_state_dict(model, optimizer)
        if rank == 0:
            torch.save({"weights": weights, "moments": moments}, path)
        dist.barrier()

        torch.manual_seed(1)
        model = build(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        saved = torch.load(path, weights_only=False)
        model.load_state_dict(saved["weights"])
        optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(saved["moments"], model))
        second = [step_of(model, optimizer, seed, device) for seed in range(STEPS, 2 * STEPS)]
        numbered = FSDP.rekey_optim_state_dict(saved["moments"], OptimStateKeyType.PARAM_ID, plain())
        dist.barrier()
        report[name] = {"first": first, "second": second, "numbers": sorted(numbered["state"])}
    return report
