"""A full state dict keeps the parameters of now and the buffers of later.

Parameters are copies there, since what they were gathered into is freed. Buffers are the model's own tensors and change
with the next batch. A dict that is kept in memory, as the best so far, say, becomes a state that the model never had.

With torch 2.13.0::

    the weight is still 1.0, the number of batches went from 0 to 1

With minifsdp::

    the weight is still 1.0, the number of batches went from 0 to 0

Spec: SD-FULL-07.
"""

import torch
import torch.distributed as dist
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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {main()}")
    dist.destroy_process_group()
