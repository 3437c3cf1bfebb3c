"""A full state dict with ``offload_to_cpu=True`` fails on a CPU.

The entries are taken from gathered memory with ``.cpu()``, which copies nothing there, and then that memory is freed.
With ``rank0_only=True`` rank 0 fails alone, and the others wait for it until their time is up.

With torch 2.13.0::

    RuntimeError: setStorage: sizes [8], strides [1], storage offset 0, and itemsize 4 requiring a storage size of...

With minifsdp::

    bias [2], weight [2, 4]

Spec: SD-FULL-06.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.Linear(4, 2), device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(model.state_dict().items()))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {main()}")
    dist.destroy_process_group()
