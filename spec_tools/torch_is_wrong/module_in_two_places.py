"""A module that is used in two places of a model is wrapped in only one of them.

With an ``auto_wrap_policy``, only the first place gets the wrapper. The second keeps the module, with freed weights.

With torch 2.13.0::

    RuntimeError: setStorage: sizes [4, 4], strides [1, 4], storage offset 0, and itemsize 4 requiring a storage...

With minifsdp::

    one module in both places: True, output [1, 1]

Spec: WRAP-03.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def main() -> str:
    model = FSDP(Twice(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))
    output = model(torch.ones(1, 4))
    return f"one module in both places: {model.first is model.second}, output {list(output.shape)}"
