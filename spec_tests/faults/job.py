"""A training that does everything once, and a fault of its last rank at one stage of it.

    python -m spec_tests.faults.job DOOR SHARDING FAULT STAGE FOLDER

All ranks but the last do nothing wrong. What they say when the last one does is what the matrix is about.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy, StateDictType
from minifsdp.engine import collectives
from spec_tests.faults.ends import ends_as_python_does
from tutorials.gpt.checkpoint import Shelf

DOORS = ("wrapper", "function")
SHARDINGS = {"full": 2, "hybrid": 4}  # and their ranks
FAULTS = ("raises", "exits", "is killed", "is stopped", "is slow")
STAGES = (
    "construction", "first forward", "gather", "compute", "backward", "reduce", "clip", "optimizer step",
    "full state dict", "sharded state dict", "local state dict", "optimizer state dict", "save", "load",
)  # fmt: skip
TIMEOUT = 4.0  # seconds, of the process groups
LIMIT = timedelta(seconds=TIMEOUT)
GROUPS = {"replicate": ([0, 2], [1, 3]), "shard": ([0, 1], [2, 3])}
SLOW = 8.0  # seconds, longer than any of them waits


class Job:
    """One rank of it.

    Args:
        door, sharding: how the model is sharded.
        fault, stage: what the last rank does, and where.
        folder: for checkpoints, and for the moment of the fault.
    """

    def __init__(self, door: str, sharding: str, fault: str, stage: str, folder: Path) -> None:
        self.door, self.sharding, self.fault, self.stage, self.folder = door, sharding, fault, stage, folder
        self.is_victim = dist.get_rank() == dist.get_world_size() - 1
        self.mesh = two_by_two() if sharding == "hybrid" else init_device_mesh("cpu", (2,))

    def strike(self, stage: str) -> None:
        """The fault, if it is the time for it."""
        if not self.is_victim or stage != self.stage:
            return
        (self.folder / "struck").write_text(str(time.time()))
        if self.fault == "raises":
            raise ValueError("a bad batch")
        if self.fault == "exits":
            sys.exit(0)
        if self.fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(SLOW)

    @contextmanager
    def striking_in(self, name: str, stage: str) -> Any:
        """The fault comes in the place of a collective."""
        send: Callable[..., Any] = getattr(collectives, name)

        def strike(*arguments: Any) -> Any:
            self.strike(stage)
            return send(*arguments)

        with mock.patch.object(collectives, name, strike):
            yield

    def sharded(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), Striking(self))
        self.strike("construction")
        if self.door == "function":
            for layer in list(model)[:3]:
                minifsdp.fully_shard(layer, mesh=self.mesh)
            minifsdp.fully_shard(model, mesh=self.mesh)
            return model
        strategy = ShardingStrategy.HYBRID_SHARD if self.sharding == "hybrid" else ShardingStrategy.FULL_SHARD
        how = {"device_mesh": self.mesh, "sharding_strategy": strategy, "sync_module_states": True}
        for index in range(3):
            model[index] = FSDP(model[index], **how)
        return FSDP(model, **how)

    def run(self) -> None:
        """All stages, one after the other."""
        self.model = self.sharded()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        shelf = Shelf(self.folder / "runs")
        self.iterate("first forward")
        shelf.save(1, {}, lambda folder: self.write(folder))
        with self.striking_in("gather", "gather"):
            self.iterate("compute")
        with self.striking_in("reduce_scatter", "reduce"):
            self.iterate("")
        for stage in self.state_dicts():
            self.strike(stage)
            self.states(stage)
        shelf.save(2, {}, lambda folder: self.write(folder, "save"))
        self.strike("load")
        self.read(self.folder / "runs" / "step-000002")
        print("done")

    def iterate(self, stage: str) -> None:
        self.optimizer.zero_grad()
        self.forward_stage = stage
        loss = self.model(torch.ones(2, 8)).square().mean()
        if stage == "compute":
            loss.register_hook(lambda gradient: self.strike("backward"))
        loss.backward()
        if stage == "compute":
            self.strike("clip")
        if self.door == "wrapper":
            self.model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if stage == "compute":
            self.strike("optimizer step")
        self.optimizer.step()

    def state_dicts(self) -> Iterable[str]:
        return STAGES[8:12]

    def states(self, stage: str) -> Any:
        """What a stage of state dicts asks for; with `fully_shard` the values of DTensors, which torch gathers."""
        if self.door == "function":
            values = self.model.state_dict().values()
            if stage == "optimizer state dict":
                states = self.optimizer.state_dict()["state"].values()
                values = [value for state in states for value in state.values() if hasattr(value, "full_tensor")]
            return [value.full_tensor() for value in values]
        if stage == "optimizer state dict":
            return FSDP.optim_state_dict(self.model, self.optimizer)
        kind = StateDictType[f"{stage.split()[0].upper()}_STATE_DICT"]
        with FSDP.state_dict_type(self.model, kind):
            return self.model.state_dict()

    def write(self, folder: Path, stage: str = "") -> None:
        self.strike(stage)
        dcp.save({"model": self.sharded_state()}, checkpoint_id=folder)

    def read(self, folder: Path) -> None:
        state = {"model": self.sharded_state()}
        dcp.load(state, checkpoint_id=folder)

    def sharded_state(self) -> dict[str, Any]:
        if self.door == "function":
            return self.model.state_dict()
        with FSDP.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT):
            return self.model.state_dict()


def two_by_two() -> DeviceMesh:
    """Two replicas in two pieces each; of groups that are made by hand, since a mesh takes no time-out."""
    lines = {name: [dist.new_group(ranks, timeout=LIMIT) for ranks in of_it] for name, of_it in GROUPS.items()}
    mine = [next(g for g in lines[name] if g != dist.GroupMember.NON_GROUP_MEMBER) for name in GROUPS]
    return DeviceMesh.from_group(mine, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=tuple(GROUPS))


class Striking(nn.Module):
    """A layer in which the fault may come."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        object.__setattr__(self, "job", job)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.job.strike(self.job.forward_stage)
        return x


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    *names, folder = sys.argv[1:]
    Job(*names, Path(folder)).run()


if __name__ == "__main__":
    ends_as_python_does(main)
