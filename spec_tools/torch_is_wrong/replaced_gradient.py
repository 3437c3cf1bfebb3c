"""A gradient that is replaced inside ``summon_full_params`` is lost.

``summon_full_params(with_grads=True)`` writes changes back on exit. For gradients, it only writes back in-place
changes. If ``.grad`` was set to a new tensor, torch silently discards it.

With torch 2.13.0::

    changed in place: 5.0, replaced: 1.0

With minifsdp::

    changed in place: 5.0, replaced: 5.0

Spec: SUMMON-15.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    return f"changed in place: {after(in_place=True)}, replaced: {after(in_place=False)}"


def after(in_place: bool) -> float:
    model = FSDP(nn.Linear(4, 2, bias=False), use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(1, 4)).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        if in_place:
            model.weight.grad.fill_(5.0)
        else:
            model.weight.grad = torch.full((2, 4), 5.0)
    with FSDP.summon_full_params(model, with_grads=True):
        return float(model.weight.grad.mean())
