"""A full state dict contains copies of the parameters, but not of the buffers.

The parameters are copies, because the all-gathered memory is freed. The buffers are the model's own tensors and change
with the next batch. If a program keeps the dict in memory, for example as the best state, the dict mixes old parameters
with new buffers.

With torch 2.13.0::

    the weight is still 1.0, the number of batches went from 0 to 1

With minifsdp::

    the weight is still 1.0, the number of batches went from 0 to 0

Spec: SD-FULL-07.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.BatchNorm1d(4), device_id=torch.device("cpu"))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = model.state_dict()
    before = int(kept["num_batches_tracked"])
    (model(torch.arange(8.0).view(2, 4)) ** 3).sum().backward()
    sgd.step()
    weight, after = float(kept["weight"].mean()), int(kept["num_batches_tracked"])
    return f"the weight is still {weight}, the number of batches went from {before} to {after}"
