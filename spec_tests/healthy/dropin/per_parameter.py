"""bfloat16 with accumulation, explicit prefetching, clipping, a schedule and an evaluation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from spec_tests.healthy.dropin.model import Transformer, loss_of

STEPS, MICRO_BATCHES = 4, 2


def prefetch(model, ahead):
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])


def main(device):
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)

    model = Transformer().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    root_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=root_policy)
    prefetch(model, 2)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        model.unshard()
        for micro in range(MICRO_BATCHES):
            is_last = micro == MICRO_BATCHES - 1
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            loss = loss_of(model, 10 * step + micro, rank, device) / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        evaluated = loss_of(model, 999, rank, device).item()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    sums = {name: parameter.full_tensor().double().sum().item() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "sums": sums}
