"""The root's inputs are cast although ``cast_root_forward_inputs=False``.

According to the documentation, this flag overrides ``cast_forward_inputs`` for the root. In fact torch casts the inputs
if either flag is set.

With torch 2.13.0::

    the root sees torch.bfloat16

With minifsdp::

    the root sees torch.float32

Spec: MP-15.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision


class Look(nn.Linear):
    def forward(self, x: torch.Tensor) -> str:
        return f"the root sees {x.dtype}"


def main() -> str:
    precision = MixedPrecision(torch.bfloat16, cast_forward_inputs=True, cast_root_forward_inputs=False)
    return FSDP(Look(4, 2), mixed_precision=precision, device_id=torch.device("cpu"))(torch.ones(1, 4))
