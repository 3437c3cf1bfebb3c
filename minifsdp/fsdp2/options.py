"""What users choose for a group of parameters: precision and offload.

*In torch:* ``_fsdp_api.py``, with the same names and fields.

Spec: FS2-01, FS2-MP-01, FS2-MP-07, FS2-OFF-01, NEW-17, NEW-18.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype at which step; ``None`` leaves a step as it is. Casts happen at the borders of modules.

    Attributes:
        param_dtype: of the gathered parameters, of compute, and of floating-point inputs if they are cast.
        reduce_dtype: in which gradients travel and are accumulated before they do; ``None`` follows ``param_dtype``.
        output_dtype: of the floating-point outputs of forward.
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """Shards stay on the compute device."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and with them the optimizer's state live on the CPU.

    Attributes:
        pin_memory: whether shards are pinned, so that copies to the device can overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the axes of a mesh that are for data parallelism.

    Attributes:
        shard: over which parameters are sharded.
        replicate: over which they are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None
