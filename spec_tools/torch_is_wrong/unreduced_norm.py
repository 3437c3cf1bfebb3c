"""Clipping gradients that were never reduced gives a meaningless norm.

If the last micro-batch of a step also runs inside ``no_sync()``, each rank has only its own gradients. Clipping treats
them as shards of one gradient and returns a number that is not the norm of any gradient. A following optimizer step
fails, because the gradients have the wrong size. Here the gradients are eight times 1 and eight times 3. The norm of
their mean is 5.657.

With torch 2.13.0::

    norm 8.944

With minifsdp::

    RuntimeError: rank 0: clip_grad_norm_() found gradients that were never reduced: no backward outside of no_sync()...

Spec: NOSYNC-10.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.Linear(4, 2, bias=False), device_id=torch.device("cpu"))
    with model.no_sync():
        model(torch.full((1, 4), 1.0 + 2 * dist.get_rank())).sum().backward()
    return f"norm {float(model.clip_grad_norm_(100.0)):.4g}"
