"""Checks whether bfloat16 has native support on this machine.

bfloat16 has the range of float32 in two bytes, so it needs no gradient scaler. It is the recommended mixed precision if
it has native support. Otherwise bfloat16 is emulated and slow, or NCCL cannot sum it. A training script writes::

    policy = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16) if bf16_supported() else None

There are three requirements: a GPU with support (A100 or later), a PyTorch build with support, and an NCCL version that
can sum bfloat16 (2.10 or later).

The check is about speed. ``MixedPrecision(param_dtype=torch.bfloat16)`` works on the CPU as well.

*In torch:* scripts combine these checks themselves.

Spec: MP-27.
"""

import torch
import torch.distributed as dist

FIRST_NCCL = (2, 10)


def bf16_supported() -> bool:
    """Whether bfloat16 is native on this rank's GPU and in NCCL; ``False`` without CUDA. Nothing is communicated."""
    return (
        torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False)
        and dist.is_nccl_available()
        and torch.cuda.nccl.version()[:2] >= FIRST_NCCL
    )
