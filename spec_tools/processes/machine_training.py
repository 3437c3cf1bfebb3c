"""Trains a model in several ways, and reports losses, seconds, and the bytes that each machine sends in a step.

    torchrun --nnodes 2 --nproc-per-node 2 spec_tools/processes/machine_training.py FILE STEPS

Rank 0 writes the result of each `Case` to ``FILE``. The bytes are those that the kernel of each machine counts at the
interface of the link: with all headers, confirmations and other messages. On one machine there is no link; all are 0.

Spec: MACHINES-03 to MACHINES-06.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from minifsdp.wrap import ModuleWrapPolicy
from minifsdp_tools.cost import Job
from spec_tools.processes.machines import sent_bytes

WIDTH, NUM_BLOCKS, ROWS = 768, 4, 8
PER_MACHINE = 2


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        api: ``wrapper`` or ``fully_shard``.
        strategy: ``FULL_SHARD`` or ``HYBRID_SHARD``.
        transport: value of ``MINIFSDP_TRANSPORT``: ``collectives`` for those of gloo, empty for minifsdp's own.
    """

    api: str
    strategy: str
    transport: str = ""

    def job(self) -> Job:
        """The case as input of the calculator."""
        num_shards = 4 if self.strategy == "FULL_SHARD" else 2
        return Job(
            [[(WIDTH, WIDTH)]] * NUM_BLOCKS,
            root=[(WIDTH, WIDTH)],
            strategy=self.strategy,
            num_shards=num_shards,
            num_replicas=4 // num_shards,
            per_parameter=self.api == "fully_shard",
            by_messages=not self.transport,
        )


CASES = [Case(api, strategy) for api in ("wrapper", "fully_shard") for strategy in ("FULL_SHARD", "HYBRID_SHARD")]
CASES += [Case("wrapper", "FULL_SHARD", "collectives")]


class Block(nn.Sequential):
    """A unit with one matrix."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())


def build(case: Case) -> nn.Module:
    """The sharded model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, WIDTH, bias=False))
    is_hybrid = case.strategy == "HYBRID_SHARD"
    mesh = init_device_mesh("cpu", (2, PER_MACHINE) if is_hybrid else (4,))
    if case.api == "wrapper":
        # Without a mesh, HYBRID_SHARD shards within each machine.
        on_two_machines = int(os.environ["LOCAL_WORLD_SIZE"]) == PER_MACHINE
        return FullyShardedDataParallel(
            model,
            device_mesh=None if on_two_machines else mesh,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[case.strategy],
            device_id=torch.device("cpu"),
        )
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(case: Case, steps: int) -> dict[str, Any]:
    """Trains. Every rank must call it.

    Returns:
        The losses of all steps, the mean over the ranks; the seconds of each step after the first; and the bytes that
        each machine has sent in such a step.
    """
    os.environ["MINIFSDP_TRANSPORT"] = case.transport
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, seconds, sent = [], [], []
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
        dist.barrier()
        before = sent_bytes()
        # No rank of the machine sends data of the step before all ranks have read the counter.
        dist.barrier()
        begun = time.perf_counter()
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # After it, all data of the step has arrived.
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        sent.append(sent_bytes() - before)
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / dist.get_world_size())
    of_all: list[Any] = [None] * dist.get_world_size()
    # The ranks count for the first time in the first step, and agree on the order of collectives there.
    dist.all_gather_object(of_all, sum(sent[1:]) / len(sent[1:]))
    return {"losses": losses, "seconds": seconds[1:], "sent": of_all[::PER_MACHINE]}


def main(file: str, steps: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [train(case, int(steps)) for case in CASES]
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
