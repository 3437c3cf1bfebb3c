"""``reset_iter_state`` keeps the gradients of a failed iteration.

Its documentation promises that the gradients of the failed iteration are lost, including gradients that were
accumulated without a reduction. However, torch keeps the accumulated ones, and the next iteration adds them. Here each
micro-batch has the gradient 1. The second one fails, and the iteration after it has one micro-batch.

With torch 2.13.0::

    gradient 2.0

With minifsdp::

    gradient 1.0

Spec: NEW-15. Right since torch 2.15.0.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> str:
    model = fully_shard(nn.Linear(4, 2, bias=False))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    try:
        model(torch.ones(1, 5))
    except RuntimeError:
        model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4)).sum().backward()
    return f"gradient {float(model.weight.grad.full_tensor().mean())}"
