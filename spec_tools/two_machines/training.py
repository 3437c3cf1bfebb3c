"""Trains a model in several ways, and reports losses, seconds, and the bytes that each machine sends in a step.

    torchrun --nnodes 2 --nproc-per-node 2 spec_tools/two_machines/training.py FILE STEPS RATE:DELAY ...

Each `Case` runs once for each link, given in bits per second and seconds. Rank 0 writes the `Result` of each case to
``FILE``. The bytes are those that the kernel of each machine counts at the interface of the link: with all headers,
confirmations and other messages. On one machine there is no link, so none are reported.

Spec: MACHINES-03 to MACHINES-06.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from minifsdp.wrap import ModuleWrapPolicy
from minifsdp_tools.cost import Job
from spec_tools.two_machines.link import bytes_of_interface
from spec_tools.two_machines.machines import SOCKET, LinkControl

WIDTH, NUM_BLOCKS, ROWS, STEPS = 768, 4, 8, 3
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

    def __str__(self) -> str:
        return " ".join(filter(None, asdict(self).values()))

    def job(self) -> Job:
        """The case as input of the calculator."""
        shapes, shards = [[(WIDTH, WIDTH)]] * NUM_BLOCKS, 4 if self.strategy == "FULL_SHARD" else 2
        return Job(
            shapes,
            root=[(WIDTH, WIDTH)],
            strategy=self.strategy,
            num_shards=shards,
            num_replicas=4 // shards,
            per_parameter=self.api == "fully_shard",
            by_messages=not self.transport,
        )


CASES = [Case(api, strategy) for api in ("wrapper", "fully_shard") for strategy in ("FULL_SHARD", "HYBRID_SHARD")]
CASES += [Case("wrapper", "FULL_SHARD", "collectives")]


@dataclass
class Result:
    """The result of a case.

    Attributes:
        losses: of all steps, the mean over the ranks.
        seconds: of each step after the first.
        sent: bytes that each machine has sent in such a step; empty on one machine.
    """

    losses: list[float]
    seconds: list[float]
    sent: list[float]


class Block(nn.Module):
    """A unit with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks, and one matrix in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def build(case: Case) -> nn.Module:
    """The sharded model."""
    torch.manual_seed(0)
    model = Net()
    if case.api == "wrapper":
        policy, strategy = ModuleWrapPolicy({Block}), ShardingStrategy[case.strategy]
        # Without a mesh, HYBRID_SHARD shards within each machine.
        mesh = None if int(os.environ["LOCAL_WORLD_SIZE"]) == PER_MACHINE else mesh_of(case)
        return FullyShardedDataParallel(
            model, device_mesh=mesh, auto_wrap_policy=policy, sharding_strategy=strategy, device_id=torch.device("cpu")
        )
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(case))
    return fully_shard(model, mesh=mesh_of(case))


def mesh_of(case: Case) -> Any:
    """One dimension for ``FULL_SHARD``; two for ``HYBRID_SHARD``, with the ranks of a machine in a row."""
    if case.strategy == "FULL_SHARD":
        return init_device_mesh("cpu", (4,))
    return init_device_mesh("cpu", (2, PER_MACHINE), mesh_dim_names=("replicate", "shard"))


def run(case: Case, steps: int) -> Result:
    """Trains. Every rank must call it; the result is complete on rank 0."""
    os.environ["MINIFSDP_TRANSPORT"] = case.transport
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, seconds, sent = [], [], []
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
        dist.barrier()
        before = sent_so_far()
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
        sent.append(sent_so_far() - before)
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / dist.get_world_size())
    of_all: list[Any] = [None] * dist.get_world_size()
    # The ranks count for the first time in the first step, and agree on the order of collectives there.
    dist.all_gather_object(of_all, sum(sent[1:]) / len(sent[1:]))
    return Result(losses, seconds[1:], [of_all[0], of_all[PER_MACHINE]] if SOCKET in os.environ else [])


def sent_so_far() -> int:
    """The bytes that this machine has sent over the link."""
    return bytes_of_interface()[1] if SOCKET in os.environ else 0


def main(file: str, steps: str, *links: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for link, case in itertools.product(links, CASES):
        rate, delay = map(float, link.split(":"))
        if SOCKET in os.environ and dist.get_rank() == 0:
            LinkControl(os.environ[SOCKET]).set(rate, delay)
        found.append({"link": [rate, delay], "case": asdict(case), "result": asdict(run(case, int(steps)))})
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
