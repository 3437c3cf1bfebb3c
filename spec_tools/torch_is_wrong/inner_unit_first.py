"""A unit that has run on its own cannot become part of a model.

An encoder runs alone before it is trained inside a larger model. After this run it is marked as a root, and the model's
first forward fails with an assertion about one of torch's own attributes.

With torch 2.13.0::

    AssertionError: Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`

With minifsdp::

    the whole model gives [1, 2]

Spec: CTOR-11.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    encoder = FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))
    model = FSDP(nn.Sequential(encoder, nn.Linear(4, 2)), device_id=torch.device("cpu"))
    encoder(torch.ones(1, 4))
    return f"the whole model gives {list(model(torch.ones(1, 4)).shape)}"
