"""Accumulation, two groups of original parameters, a schedule, clipping, and in float16 a gradient scaler."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from spec_tests.healthy.dropin.model import Block, Transformer, loss_of

MICRO_BATCHES, STEPS = 3, 6


def parameter_groups(model):
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        (no_decay if name.endswith("bias") or "norm" in name else decay).append(parameter)
    return [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]


def main(device, dtype, use_orig_params):
    torch.manual_seed(0)
    model = FSDP(
        Transformer(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if use_orig_params else ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=use_orig_params,
        device_id=device,
    )
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=STEPS)
    # The initial scale is too large, so all ranks skip the first one or two steps.
    scaler = ShardedGradScaler(
        device=device.type, init_scale=2.0**18, growth_interval=2, enabled=dtype == torch.float16
    )

    report = {"losses": [], "norms": [], "scales": [], "rates": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for micro in range(MICRO_BATCHES):
            with model.no_sync() if micro < MICRO_BATCHES - 1 else contextlib.nullcontext():
                loss = loss_of(model, 10 * step + micro, dist.get_rank(), device) / MICRO_BATCHES
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.5)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # the step was not skipped
            schedule.step()
        dist.all_reduce(total)
        report["losses"].append(total.item() / dist.get_world_size())
        report["norms"].append(norm.item() if norm.isfinite() else "not finite")
        report["scales"].append(scaler.get_scale())
        report["rates"].append(schedule.get_last_lr())

    with FSDP.summon_full_params(model, writeback=False):
        report["weights"] = {name: p.double().abs().sum().item() for name, p in model.named_parameters()}
    return report
