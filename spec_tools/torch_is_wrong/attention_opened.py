"""With mixed precision, the size-based policy wraps a submodule of ``nn.MultiheadAttention``.

``size_based_auto_wrap_policy`` does not wrap submodules of ``nn.MultiheadAttention``, because this module uses their
weights without calling them. With mixed precision, batch norms get units of their own. When torch searches for batch
norms, it applies the policy to all modules again, including the submodules of the attention.

With torch 2.13.0::

    RuntimeError: Output 0 of View is a view and its base or another view of its base has been modified inplace. This...

With minifsdp::

    output [12, 20]

Spec: MP-19, WRAP-07.
"""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(20, 1)
        self.norm = nn.BatchNorm1d(20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attention(x, x, x)[0].flatten(0, 1))


def main() -> str:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    precision = MixedPrecision(torch.bfloat16)
    model = FSDP(Model(), auto_wrap_policy=policy, mixed_precision=precision, device_id=torch.device("cpu"))
    return f"output {list(model(torch.ones(3, 4, 20)).shape)}"
