"""A program in which rank 1 leaves out a unit in the third step: ``leaves_out_a_unit.py cuda``, or ``cpu``."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.subject import fully_shard

TIMEOUT = timedelta(minutes=5)


def main() -> None:
    kind, rank = sys.argv[1], int(os.environ["RANK"])
    device = torch.device("cpu")
    if kind == "cuda":
        if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
            os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(timeout=TIMEOUT, device_id=device if kind == "cuda" else None)
    layers = [nn.Linear(8, 8, bias=bias, device=device) for bias in (True, False)]
    for layer in layers:
        fully_shard(layer)
    optimizer = torch.optim.SGD([parameter for layer in layers for parameter in layer.parameters()], lr=0.1)
    for step in range(6):
        x = torch.ones(2, 8, device=device)
        for number, layer in enumerate(layers):
            if not (step == 2 and rank == 1 and number == 0):
                x = layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        # The device is behind, as in a real job; the watchdog has time to find the difference.
        time.sleep(5.0 * (step == 2))
    print("done", flush=True)


if __name__ == "__main__":
    main()
