"""The saved first moments of Adam contain the values of the second moments.

This happens in the full optimizer state dict of original parameters. torch all-gathers one kind of state after the
other into the same memory and calls ``.cpu()`` on each. If training runs on the CPU, ``.cpu()`` does not copy, so all
entries show the state that was all-gathered last. Training that resumes from such a dict silently takes wrong steps.

All of these conditions are necessary: original parameters, more than one rank, a strategy that shards, the full type
with ``offload_to_cpu=True`` (the default), and training on the CPU. With flat parameters, ``offload_to_cpu=False`` or
the sharded type, the values are correct. The gradients here are 1. After the first step of Adam, ``exp_avg`` is 0.1
and ``exp_avg_sq`` is 0.001.

With torch 2.13.0::

    exp_avg 0.001, exp_avg_sq 0.001

With minifsdp::

    exp_avg 0.1, exp_avg_sq 0.001

Spec: OSD-04, OSD-08.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.Linear(4, 2), use_orig_params=True, device_id=torch.device("cpu"))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    found = FSDP.optim_state_dict(model, adam)["state"]["weight"]
    return ", ".join(f"{name} {float(found[name].mean()):.4g}" for name in ("exp_avg", "exp_avg_sq"))
