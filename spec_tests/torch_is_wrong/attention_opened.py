"""With mixed precision a policy wraps a part of an attention that it had declined to look into.

``size_based_auto_wrap_policy`` leaves an ``nn.MultiheadAttention`` whole, since it uses the weights of its parts
without calling them. In mixed precision batch norms get units of their own. Looking for them, torch asks the policy
again about everything, inside of the attention, too.

With torch 2.13.0::

    RuntimeError: Output 0 of View is a view and its base or another view of its base has been modified inplace. This...

With minifsdp::

    output [12, 20]

Spec: MP-19, WRAP-07.
"""

import functools

import torch
import torch.distributed as dist
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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {main()}")
    dist.destroy_process_group()
