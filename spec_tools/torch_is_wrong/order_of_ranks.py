"""If ranks run units in different orders, they compute with mixed weights of these units.

The model uses ``fully_shard`` and has a branch that depends on the rank's own data. Collectives are matched by their
order: one rank's all-gather of the first unit is matched with the other rank's all-gather of the second unit. If the
sizes are equal, there is no error, and each rank computes with half the weights of one unit and half of the other.

The weights of the first unit are 1, those of the second 10.

With torch 2.13.0::

    weight of the first unit: 1.0 to 10.0

With minifsdp::

    RuntimeError: rank 0: the ranks are about to all-gather different units, rank 0: '0', rank 1: '1'; before...

Spec: NEW-19.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Branches(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = self if dist.get_rank() == 0 else reversed(self)
        for layer in order:
            x = layer(x)
        return x


def main() -> str:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    seen = []
    for layer, value in zip(layers, (1.0, 10.0), strict=True):
        nn.init.constant_(layer.weight, value)
        layer.register_forward_hook(lambda layer, *_: seen.append((layer, layer.weight.aminmax())))
        fully_shard(layer)
    fully_shard(Branches(layers))(torch.ones(1, 4))
    low, high = next(weight for layer, weight in seen if layer is layers[0])
    return f"weight of the first unit: {float(low)} to {float(high)}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {main()}")
    dist.destroy_process_group()
