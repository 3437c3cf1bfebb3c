"""After ``no_sync()``, ``zero_grad(set_to_none=False)`` does not clear the reduced gradient.

After a backward with reduction and a backward inside ``no_sync()``, a parameter has a reduced and an unreduced
gradient. ``.grad`` is the unreduced one. ``zero_grad`` fills it with zeros, but not the reduced one, which torch stores
separately. The next backward adds to the reduced one. The batches here are 100, 10 and, after ``zero_grad``, 1.

With torch 2.13.0::

    gradient 101.0

With minifsdp::

    gradient 1.0

Spec: FWD-07, NOSYNC-02.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.Linear(4, 2, bias=False), device_id=torch.device("cpu"))
    backward(model, 100.0)
    with model.no_sync():
        backward(model, 10.0)
    model.zero_grad(set_to_none=False)
    backward(model, 1.0)
    return f"gradient {float(next(model.parameters()).grad.mean())}"


def backward(model: nn.Module, value: float) -> None:
    model(torch.full((1, 4), value)).sum().backward()
