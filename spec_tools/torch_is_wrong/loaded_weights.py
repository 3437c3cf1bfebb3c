"""Loaded weights are replaced by random initial values.

The body of the model is loaded, and its new head is on the meta device. According to the documentation, torch
initializes modules with parameters or buffers on the meta device. If there is one, torch resets every module, with
``reset_parameters()`` or with ``param_init_fn``. It silently discards the loaded weights.

All loaded weights of the body are 7.

With torch 2.13.0::

    the body is as it was loaded: False

With minifsdp::

    the body is as it was loaded: True

Spec: META-01.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    body, head = nn.Linear(2, 2), nn.Linear(2, 1, device="meta")
    nn.init.constant_(body.weight, 7.0)
    model = FSDP(nn.Sequential(body, head), device_id=torch.device("cpu"))
    with FSDP.summon_full_params(model):
        return f"the body is as it was loaded: {bool((body.weight == 7.0).all())}"
