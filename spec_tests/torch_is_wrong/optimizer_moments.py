"""Adam's first moments are saved as its second ones.

A full optimizer state of original parameters. torch gathers one kind of state after the other into the same memory and
takes each from there with ``.cpu()``. That copies nothing where the computation is on the CPU already, so every name
shows what was gathered last. Whoever resumes from such a dict steps into wrong directions, and nothing says so.

It takes all of: original parameters, more than one rank, a strategy that shards, the full type with
``offload_to_cpu=True`` (the default), computation on the CPU. With flat parameters, with ``offload_to_cpu=False``, or
sharded the values are right. The first step of Adam makes ``exp_avg`` a tenth of a gradient, here of 1, and
``exp_avg_sq`` a thousandth.

With torch 2.13.0::

    exp_avg 0.001, exp_avg_sq 0.001

With minifsdp::

    exp_avg 0.1, exp_avg_sq 0.001

Spec: OSD-04, OSD-08.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> str:
    model = FSDP(nn.Linear(4, 2), use_orig_params=True, device_id=torch.device("cpu"))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    found = FSDP.optim_state_dict(model, adam)["state"]["weight"]
    return ", ".join(f"{name} {float(found[name].mean()):.4g}" for name in ("exp_avg", "exp_avg_sq"))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {main()}")
    dist.destroy_process_group()
