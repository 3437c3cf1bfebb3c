"""User options for ``FullyShardedDataParallel``: enums and dataclasses.

These classes contain only data. `BackwardPrefetch` is defined in ``engine/schedule.py``, because the engine uses it.
All names, members, fields and defaults are those of ``torch.distributed.fsdp``, so code that constructs these objects
only needs a new import line.

The main idea: *a strategy is a mesh and one flag*. The mesh determines which ranks share one sharded copy and which
ranks hold the same shard. The flag determines whether parameters are resharded after forward. The table uses W ranks in
total and L ranks per node:

=======================  ===========  ===============  =====================  =============
strategy                 shard group  replicate group  reshard after forward  also known as
=======================  ===========  ===============  =====================  =============
``FULL_SHARD``           W            1                yes                    ZeRO-3
``SHARD_GRAD_OP``        W            1                no                     ZeRO-2
``NO_SHARD``             1            W                nothing to reshard     DDP
``HYBRID_SHARD``         L            W / L            yes
``_HYBRID_SHARD_ZERO2``  L            W / L            no
=======================  ===========  ===============  =====================  =============

*In torch:* ``torch/distributed/fsdp/api.py``.

Spec: SHARD-01, PREF-01, MP-01, OFF-01.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from minifsdp.engine.schedule import BackwardPrefetch as BackwardPrefetch


class ShardingStrategy(Enum):
    """Whether parameters, gradients and optimizer state are sharded, over which ranks, and when units reshard."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


@dataclass
class MixedPrecision:
    """The dtypes for mixed precision; ``None`` means no cast.

    Attributes:
        param_dtype: dtype of the unsharded parameters, and therefore of forward and backward compute. The stored shards
            and the optimizer keep full precision.
        reduce_dtype: dtype for gradient reduction; ``None`` means ``param_dtype``.
        buffer_dtype: dtype that floating-point buffers are cast to at the first forward.
        keep_low_precision_grads: whether the sharded gradient stays in the dtype of the reduction.
        cast_forward_inputs: whether a unit that is not the root casts its floating-point inputs to ``param_dtype``.
        cast_root_forward_inputs: whether the root casts its floating-point inputs to ``param_dtype``.
        _module_classes_to_ignore: with an auto-wrap policy, modules of these classes become separate units without
            mixed precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """Whether shards, their gradients and therefore the optimizer state are stored on the CPU between computations."""

    offload_params: bool = False


ProcessGroupType = (
    dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
)
