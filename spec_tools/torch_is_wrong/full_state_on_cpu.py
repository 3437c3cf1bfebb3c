"""On a CPU, a full state dict with ``offload_to_cpu=True`` fails.

torch calls ``.cpu()`` on views of the all-gathered memory. On a CPU this does not copy, and then torch frees the
memory. With ``rank0_only=True`` only rank 0 fails, and the other ranks wait for it until the timeout.

With torch 2.13.0::

    RuntimeError: setStorage: sizes [8], strides [1], storage offset 0, and itemsize 4 requiring a storage size of...

With minifsdp::

    bias [2], weight [2, 4]

Spec: SD-FULL-06. Right since torch 2.14.1.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.Linear(4, 2), device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(model.state_dict().items()))
