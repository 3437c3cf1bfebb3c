"""Does bfloat16 run natively here?

bfloat16 has the range of float32 in two bytes, so it needs no scaler, and where the hardware computes in it, it is the
mixed precision to choose. Elsewhere it is emulated, slowly, or the network cannot add it. A training script asks once::

    policy = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16) if bf16_supported() else None

Three things must be there: a GPU that is new enough (the A100 and later), a PyTorch that was built for it, and an NCCL
that can add bfloat16, which is 2.10 or later.

The answer is about speed. ``MixedPrecision(param_dtype=torch.bfloat16)`` works on the CPU as well.

*In torch:* scripts put these questions together by themselves.

Spec: MP-27.
"""

import torch
import torch.distributed as dist

FIRST_NCCL = (2, 10)


def bf16_supported() -> bool:
    """Whether bfloat16 is native on this rank's GPU and in NCCL; ``False`` without CUDA. Nothing is communicated."""
    if not torch.cuda.is_available() or not torch.cuda.is_bf16_supported(including_emulation=False):
        return False
    return dist.is_nccl_available() and torch.cuda.nccl.version()[:2] >= FIRST_NCCL
