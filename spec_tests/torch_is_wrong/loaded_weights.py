"""Loaded weights are drawn at random again.

A model whose body is loaded and whose new head is on the meta device. The documentation promises that modules with
parameters or buffers on the meta device are initialised. torch finds one of them and then resets every module of the
tree, with ``reset_parameters()`` or with ``param_init_fn``. What was loaded is gone, without a word.

The body was loaded with sevens.

With torch 2.13.0::

    the body is as it was loaded: False

With minifsdp::

    the body is as it was loaded: True

Spec: META-01.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    body, head = nn.Linear(2, 2), nn.Linear(2, 1, device="meta")
    nn.init.constant_(body.weight, 7.0)
    model = FSDP(nn.Sequential(body, head), device_id=torch.device("cpu"))
    with FSDP.summon_full_params(model):
        return f"the body is as it was loaded: {bool((body.weight == 7.0).all())}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {main()}")
    dist.destroy_process_group()
