"""A training that runs every stage once, with a fault of one rank at one stage.

    python -m spec_tools.faults.job API SHARDING FAULT STAGE VICTIM FOLDER

All other ranks are correct; the matrix checks their reports of the fault. If the job is started again with the fault
``none``, as torchrun restarts a job, it continues from its newest checkpoint. ::

    first run    step 1, save, steps 2 and 3, state dicts, loads, save, load, step 4
    second run   the steps that the newest checkpoint does not contain

At the end rank 0 writes the losses of all steps to ``FOLDER/result``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifsdp.engine import collectives
from spec_tests import subject
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, StateDictType
from spec_tools.faults.ends import ends_as_python_does
from tutorials.gpt.apis import FunctionApi, WrapperApi
from tutorials.gpt.checkpoint import CheckpointFolder, choose
from tutorials.gpt.resume import Training, resume, save

APIS = ("wrapper", "function")
SHARDINGS = {"full": 2, "hybrid": 4}  # with their numbers of ranks
FAULTS = ("raises", "exits", "is killed", "is stopped", "is slow")
STEPS = 4
# In the order in which they run, with the checkpoint that is the newest at that stage.
STAGES = {
    **dict.fromkeys(("construction", "first forward"), ""),
    **dict.fromkeys(("gather", "compute", "backward", "clip", "optimizer step", "reduce"), "step-000001"),
    **dict.fromkeys(("full state dict", "sharded state dict", "local state dict"), "step-000001"),
    **dict.fromkeys(("optimizer state dict", "load state dict", "load optimizer"), "step-000001"),
    **dict.fromkeys(("save", "inside a save"), "step-000001"),
    **dict.fromkeys(("load", "inside a load"), "step-000003"),
}
TIMEOUT = 4.0  # seconds, of the process groups
LIMIT = timedelta(seconds=TIMEOUT)
TO_MEET = 60.0  # seconds, at the start, because many cells start at once
GROUPS = {"replicate": ([0, 2], [1, 3]), "shard": ([0, 1], [2, 3])}
SLOW = 2 * TIMEOUT  # seconds, longer than any other rank waits
NOTES: dict[str, Any] = {"fixed": {}, "noted": {}}


class Job:
    """The job on one rank.

    Args:
        api, sharding: how the model is sharded.
        fault, stage, victim: the fault, its stage, and the rank that has it.
        folder: for checkpoints, for the time of the fault, and for the losses.
        limit: the time-out of the process groups.
    """

    def __init__(
        self, api: str, sharding: str, fault: str, stage: str, victim: str, folder: Path, limit: timedelta
    ) -> None:
        self.api, self.sharding, self.fault, self.stage, self.folder = api, sharding, fault, stage, folder
        self.is_victim = fault != "none" and dist.get_rank() == int(victim)
        self.mesh = two_by_two(limit) if sharding == "hybrid" else init_device_mesh("cpu", (2,))
        self.forward_stage = ""

    def strike(self, stage: str) -> None:
        """Triggers the fault if this is its rank and its stage."""
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
        # In a file with this name, so that the reports of other ranks show it as this rank's line.
        eval(compile(f"sleep({SLOW})", f"{stage}.py", "eval"), {"__name__": stage, "sleep": time.sleep})

    @contextmanager
    def striking_at(self, owner: Any, name: str, stage: str, *, behind: bool = False) -> Any:
        """Triggers the fault before a function is called, or with ``behind`` after it."""
        if not self.is_victim:
            yield
            return
        original: Callable[..., Any] = getattr(owner, name)

        def strike(*arguments: Any) -> Any:
            if not behind:
                self.strike(stage)
            given = original(*arguments)
            if behind:
                self.strike(stage)
            return given

        with mock.patch.object(owner, name, strike):
            yield

    def sharded(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), Striking(self))
        strategy = ShardingStrategy.HYBRID_SHARD if self.sharding == "hybrid" else ShardingStrategy.FULL_SHARD
        for index in range(3):
            model[index] = self.unit(model[index], strategy)
            self.strike("construction" if index == 0 else "")
        return self.unit(model, strategy)

    def unit(self, module: nn.Module, strategy: ShardingStrategy) -> nn.Module:
        if self.api == "function":
            subject.fully_shard(module, mesh=self.mesh)
            return module
        return FSDP(
            module,
            device_mesh=self.mesh,
            device_id=torch.device("cpu"),
            sharding_strategy=strategy,
            sync_module_states=True,
        )

    def run(self) -> None:
        """The first run; without a fault, the second run, which resumes."""
        self.model = self.sharded()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        api = FunctionApi() if self.api == "function" else WrapperApi("minifsdp")
        self.training = Training(self.model, self.optimizer, api)
        if self.fault != "none":
            self.everything()
        else:
            self.read()
        while self.training.step < STEPS:
            self.iterate("")
        if dist.get_rank() == 0:
            (self.folder / "result").write_text(json.dumps(self.training.losses))

    def everything(self) -> None:
        """Runs all stages, one after the other."""
        checkpoints = CheckpointFolder(self.folder / "runs")
        self.iterate("first forward")
        save(checkpoints, self.training, **NOTES, full=False)
        with self.striking_at(collectives, "all_gather", "gather"):
            self.iterate("compute")
        with self.striking_at(collectives, "reduce_scatter", "reduce"):
            self.iterate("")
        self.states()
        self.strike("save")
        with self.striking_at(dcp.FileSystemWriter, "write_data", "inside a save", behind=True):
            save(checkpoints, self.training, **NOTES, full=False)
        self.strike("load")
        with self.striking_at(dcp.FileSystemReader, "read_data", "inside a load", behind=True):
            self.read()

    def iterate(self, stage: str) -> None:
        self.optimizer.zero_grad()
        self.forward_stage = stage
        inputs = torch.full((2, 8), 0.1 * (1 + self.training.step) + dist.get_rank())
        loss = self.model(inputs).square().mean()
        if stage == "compute":
            loss.register_hook(lambda gradient: self.strike("backward"))
        loss.backward()
        if stage == "compute":
            self.strike("clip")
        if self.api == "wrapper":
            self.model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if stage == "compute":
            self.strike("optimizer step")
        self.optimizer.step()
        self.training.finish_step(loss.item())

    def states(self) -> None:
        """Creates every kind of state dict, and loads the full ones."""
        (self.states_of_wrapper if self.api == "wrapper" else self.states_of_function)()

    def states_of_wrapper(self) -> None:
        for kind in ("full", "sharded", "local"):
            self.strike(f"{kind} state dict")
            with FSDP.state_dict_type(self.model, StateDictType[f"{kind.upper()}_STATE_DICT"]):
                self.model.state_dict()
        full = self.model.state_dict()
        self.strike("optimizer state dict")
        of_optimizer = FSDP.optim_state_dict(self.model, self.optimizer)
        self.strike("load state dict")
        self.model.load_state_dict(full)
        self.strike("load optimizer")
        self.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self.model, self.optimizer, of_optimizer))

    def states_of_function(self) -> None:
        whole = of_torch.StateDictOptions(full_state_dict=True)
        on_first_rank = of_torch.StateDictOptions(full_state_dict=True, cpu_offload=True)
        self.strike("full state dict")
        of_torch.get_model_state_dict(self.model, options=on_first_rank)
        self.strike("sharded state dict")
        of_torch.get_model_state_dict(self.model)
        self.strike("local state dict")
        self.model.state_dict()
        full = of_torch.get_model_state_dict(self.model, options=whole)
        self.strike("optimizer state dict")
        of_optimizer = of_torch.get_optimizer_state_dict(self.model, self.optimizer, options=whole)
        self.strike("load state dict")
        of_torch.set_model_state_dict(self.model, full, options=whole)
        self.strike("load optimizer")
        of_torch.set_optimizer_state_dict(self.model, self.optimizer, of_optimizer, options=whole)

    def read(self) -> None:
        """Continues from the newest checkpoint, if there is one."""
        runs = self.folder / "runs"
        checkpoint = choose(runs, runs, say=lambda text: None)
        if checkpoint is not None:
            resume(checkpoint, self.training, **NOTES)


def two_by_two(limit: timedelta) -> DeviceMesh:
    """Two replicas of two shards each. The groups are created manually, because a mesh has no time-out argument."""
    lines = {name: [dist.new_group(ranks, timeout=limit) for ranks in of_it] for name, of_it in GROUPS.items()}
    mine = [next(g for g in lines[name] if g != dist.GroupMember.NON_GROUP_MEMBER) for name in GROUPS]
    return DeviceMesh.from_group(mine, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=tuple(GROUPS))


class Striking(nn.Module):
    """A layer that can trigger the fault."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        object.__setattr__(self, "job", job)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.job.strike(self.job.forward_stage)
        return x


def meet(limit: timedelta) -> None:
    """Joins the ranks. They have more time for the start than afterwards.

    Args:
        limit: the time-out of the process groups.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    has_store = rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, num_ranks, has_store, timedelta(seconds=TO_MEET))
    store.set(f"{rank} is here", "")
    store.wait([f"{other} is here" for other in range(num_ranks)])
    store.set_timeout(limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)


def main() -> None:
    torch.set_num_threads(1)
    api, sharding, fault, stage, victim, folder = sys.argv[1:]
    # Without a fault, a slow rank must not cause an error.
    limit = timedelta(seconds=TO_MEET) if fault == "none" else LIMIT
    meet(limit)
    Job(api, sharding, fault, stage, victim, Path(folder), limit).run()


if __name__ == "__main__":
    ends_as_python_does(main)
