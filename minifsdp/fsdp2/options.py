"""User options for ``fully_shard``: mixed precision and CPU offload.

*In torch:* ``_fsdp_api.py``, with the same names and fields.

Spec: FS2-01, FS2-MP-01, FS2-MP-07, FS2-OFF-01, NEW-17, NEW-30.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes for mixed precision; ``None`` means no cast. Casts happen at module boundaries.

    Attributes:
        param_dtype: dtype of the unsharded parameters, of compute, and of floating-point inputs if they are cast.
        reduce_dtype: dtype for gradient reduction and for accumulation before it; ``None`` means ``param_dtype``.
        output_dtype: dtype to cast the floating-point outputs of forward to.
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
        param_dtype_override_fn: called once with each parameter; returns its dtype to keep it, or ``None`` for
            ``param_dtype``. It must return the same on every rank.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = (
        field(default=None, kw_only=True)
    )


@dataclass
class OffloadPolicy:
    """Disables offload: shards stay on the compute device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Stores shards, gradients and therefore optimizer state on the CPU.

    Attributes:
        pin_memory: whether shards are in pinned memory, so that copies to the device can overlap with compute.
    """

    pin_memory: bool = True
