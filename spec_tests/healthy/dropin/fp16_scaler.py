"""float16 with a gradient scaler, original parameters in two groups, a schedule, and clipping."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS = 6


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.layer(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 12)
        self.body = nn.Sequential(Residual(12), Residual(12))
        self.leave = nn.Linear(12, 4)

    def forward(self, x):
        return self.leave(self.body(self.enter(x)))


def parameter_groups(model):
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        (no_decay if name.endswith("bias") or "norm" in name else decay).append(parameter)
    return [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]


def main(device):
    torch.manual_seed(0)

    model = FSDP(
        Classifier(),
        auto_wrap_policy=ModuleWrapPolicy({Residual}),
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
        device_id=device,
    )
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=STEPS)
    # The initial scale is too large, so all ranks skip the first one or two steps.
    scaler = ShardedGradScaler(device=device.type, init_scale=2.0**18, growth_interval=2)

    report = {"losses": [], "norms": [], "scales": [], "rates": []}
    dice = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(6, 5, generator=dice).to(device)
        y = torch.randint(4, (6,), generator=dice).to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(max_norm=0.3)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # the step was not skipped
            schedule.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        report["losses"].append(total.item() / dist.get_world_size())
        report["norms"].append(norm.item() if norm.isfinite() else "not finite")
        report["scales"].append(scaler.get_scale())
        report["rates"].append(schedule.get_last_lr())

    with FSDP.summon_full_params(model):
        report["weights"] = {name: p.double().abs().sum().item() for name, p in model.named_parameters()}
    return report
