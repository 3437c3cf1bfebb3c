"""On a CPU, a full state dict with ``offload_to_cpu=True`` and original parameters crashes.

This is the program of the previous case, with ``use_orig_params=True``. It reads freed memory, and the process crashes.

With torch 2.13.0::

    Signal 11 (SIGSEGV)

With minifsdp::

    bias [2], weight [2, 4]

Spec: SD-FULL-06. Right since torch 2.14.1.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.Linear(4, 2), use_orig_params=True, device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(model.state_dict().items()))
