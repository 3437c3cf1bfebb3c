"""With a delayed all-reduce, the gradient of one expert is added to the gradient of another.

``set_requires_all_reduce(False)`` keeps the reduce-scattered gradients of a unit in one buffer until a backward
all-reduces them. torch does not check that the next backward has gradients of the same parameters. If they have the
same size, it adds them up without an error. Here each of two micro-batches uses one of two experts, and the correct
gradients are 100 and 1. minifsdp counts a missing gradient as zero.

With torch 2.13.0::

    gradients None and 101.0

With minifsdp::

    gradients 100.0 and 1.0

Spec: NEW-08. Ranks: 4. Right since torch 2.15.0.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](x)


def main() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Experts(), mesh=mesh)
    model.set_requires_all_reduce(False)
    model(torch.full((1, 4), 100.0), 0).sum().backward()
    model.set_requires_all_reduce(True)
    model(torch.full((1, 4), 1.0), 1).sum().backward()
    found = [None if p.grad is None else float(p.grad.full_tensor().mean()) for p in model.parameters()]
    return f"gradients {found[0]} and {found[1]}"
