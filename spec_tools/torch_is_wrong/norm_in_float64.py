"""Gradients in float64 cannot be clipped.

``clip_grad_norm_`` requests norms in float32, and PyTorch does not compute a norm in a dtype narrower than its input.

With torch 2.13.0::

    RuntimeError: linalg.vector_norm: the dtype of the input (Double) should be convertible without narrowing to the...

With minifsdp::

    2.828 in torch.float64

Spec: CLIP-07.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.Linear(4, 2, bias=False, dtype=torch.float64), device_id=torch.device("cpu"))
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    norm = model.clip_grad_norm_(100.0)
    return f"{norm:.4g} in {norm.dtype}"
