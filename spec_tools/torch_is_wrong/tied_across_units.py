"""A weight that is tied across two units becomes two independent weights.

Each unit flattens the tied weight into its own flat parameter, so there are two copies, which are trained
independently. ``fully_shard`` raises an error in this case, in torch too.

With torch 2.13.0::

    after a step the two are equal: False

With minifsdp::

    ValueError: rank 0: parameter 'weight' is the same as 'weight' of a unit that was wrapped before. A parameter...

Spec: ORIG-16.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    layers[1].weight = layers[0].weight
    layers[0].weight.data.copy_(torch.arange(4.0).view(2, 2))
    cpu = torch.device("cpu")
    model = FSDP(nn.Sequential(*(FSDP(layer, device_id=cpu) for layer in layers)), device_id=cpu)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.tensor([[1.0, 2.0]])) ** 2).sum().backward()
    sgd.step()
    with FSDP.summon_full_params(model):
        return f"after a step the two are equal: {torch.equal(layers[0].weight, layers[1].weight)}"
