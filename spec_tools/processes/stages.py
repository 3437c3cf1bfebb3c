"""A training that runs every stage once, with a fault of one rank at one stage.

    python -m spec_tools.processes.stages API SHARDING FAULT STAGE VICTIM FOLDER

All other ranks are correct. If the job is started again with the fault ``none``, as torchrun restarts a job, it
continues from its newest checkpoint. ::

    first run    step 1, save, steps 2 and 3, state dicts, loads, save, load, step 4
    second run   the steps that the newest checkpoint does not contain

At the end rank 0 writes the losses of all steps to ``FOLDER/result``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.device_mesh import init_device_mesh

from minifsdp.engine import collectives
from spec_tests import subject
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, StateDictType
from spec_tools.processes.faults import calling, commit
from spec_tools.processes.ranks import end_as_python_does
from tutorials.gpt.apis import FunctionApi, WrapperApi
from tutorials.gpt.checkpoint import CheckpointFolder, choose
from tutorials.gpt.resume import Training, resume, save

APIS = ("wrapper", "function")
SHARDINGS = {"full": 2, "hybrid": 4}  # with their numbers of ranks
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
TO_MEET = 60.0  # seconds, at the start, because many jobs start at once
NOTES: dict[str, Any] = {"fixed": {}, "noted": {}}


class Job:
    """The job on one rank.

    Args:
        api, sharding: how the model is sharded.
        fault, stage: the fault of this rank and its stage; ``"none"`` for no fault.
        folder: for checkpoints, for a mark when the fault occurs, and for the losses.
    """

    def __init__(self, api: str, sharding: str, fault: str, stage: str, folder: Path) -> None:
        self.api, self.fault, self.stage, self.folder = api, fault, stage, folder
        is_hybrid = sharding == "hybrid"
        self.mesh = init_device_mesh("cpu", (2, 2) if is_hybrid else (2,))
        self.strategy = ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
        self.forward_stage = ""
        self.checkpoints = CheckpointFolder(folder / "runs")

    def strike(self, stage: str) -> None:
        """Triggers the fault if this is its stage."""
        if self.fault != "none" and stage == self.stage:
            (self.folder / "struck").touch()
            # Longer than any other rank waits.
            commit(self.fault, 2 * TIMEOUT)

    def start(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(3)]
        layers[-1].register_forward_hook(lambda *_: self.strike(self.forward_stage))
        units = []
        for layer in layers:
            units.append(self.unit(layer))
            if len(units) == 1:
                self.strike("construction")
        self.model: Any = self.unit(nn.Sequential(*units))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        api = FunctionApi() if self.api == "function" else WrapperApi("minifsdp")
        self.training = Training(self.model, self.optimizer, api)

    def unit(self, module: nn.Module) -> nn.Module:
        if self.api == "function":
            subject.fully_shard(module, mesh=self.mesh)
            return module
        place = {"device_mesh": self.mesh, "device_id": torch.device("cpu")}
        return FSDP(module, **place, sharding_strategy=self.strategy, sync_module_states=True)

    def run_every_stage(self) -> None:
        self.iterate("first forward")
        self.save()
        with calling(collectives, "all_gather", before=lambda: self.strike("gather")):
            self.iterate("compute")
        with calling(collectives, "reduce_scatter", before=lambda: self.strike("reduce")):
            self.iterate("")
        for stage in self.states_of_wrapper() if self.api == "wrapper" else self.states_of_function():
            self.strike(stage)
        self.strike("save")
        with calling(dcp.FileSystemWriter, "write_data", after=lambda: self.strike("inside a save")):
            self.save()
        self.strike("load")
        with calling(dcp.FileSystemReader, "read_data", after=lambda: self.strike("inside a load")):
            self.resume()

    def finish(self) -> None:
        while self.training.step < STEPS:
            self.iterate("")
        if dist.get_rank() == 0:
            (self.folder / "result").write_text(json.dumps(self.training.losses))

    def iterate(self, stage: str) -> None:
        self.optimizer.zero_grad()
        self.forward_stage = stage
        inputs = torch.full((2, 8), 0.1 * (1 + self.training.step) + dist.get_rank())
        loss = self.model(inputs).square().mean()
        is_faulty = stage == "compute"
        if is_faulty:
            loss.register_hook(lambda gradient: self.strike("backward"))
        loss.backward()
        if is_faulty:
            self.strike("clip")
        if self.api == "wrapper":
            self.model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if is_faulty:
            self.strike("optimizer step")
        self.optimizer.step()
        self.training.finish_step(loss.item())

    def states_of_wrapper(self) -> Iterator[str]:
        """Creates every kind of state dict, and loads the full ones. Yields each stage before it begins."""
        for kind in ("full", "sharded", "local"):
            yield f"{kind} state dict"
            with FSDP.state_dict_type(self.model, StateDictType[f"{kind.upper()}_STATE_DICT"]):
                self.model.state_dict()
        full = self.model.state_dict()
        yield "optimizer state dict"
        of_optimizer = FSDP.optim_state_dict(self.model, self.optimizer)
        yield "load state dict"
        self.model.load_state_dict(full)
        yield "load optimizer"
        self.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self.model, self.optimizer, of_optimizer))

    def states_of_function(self) -> Iterator[str]:
        whole = of_torch.StateDictOptions(full_state_dict=True)
        yield "full state dict"
        full = of_torch.get_model_state_dict(self.model, options=whole)
        yield "sharded state dict"
        of_torch.get_model_state_dict(self.model)
        yield "local state dict"
        self.model.state_dict()
        # So that the other ranks notice a fault at the stage above.
        of_torch.get_model_state_dict(self.model, options=whole)
        yield "optimizer state dict"
        of_optimizer = of_torch.get_optimizer_state_dict(self.model, self.optimizer, options=whole)
        yield "load state dict"
        of_torch.set_model_state_dict(self.model, full, options=whole)
        yield "load optimizer"
        of_torch.set_optimizer_state_dict(self.model, self.optimizer, of_optimizer, options=whole)

    def save(self) -> None:
        save(self.checkpoints, self.training, **NOTES, full=False)

    def resume(self) -> None:
        """Continues from the newest checkpoint, if there is one."""
        checkpoint = choose(self.checkpoints.root, self.checkpoints.root, say=lambda text: None)
        if checkpoint is not None:
            resume(checkpoint, self.training, **NOTES)


def meet(limit: timedelta) -> None:
    """Joins the ranks. They have more time for the start than ``limit``, the time-out of the process groups."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    has_store = rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, num_ranks, has_store, timedelta(seconds=TO_MEET))
    store.set(f"{rank} is here", "")
    store.wait([f"{other} is here" for other in range(num_ranks)])
    store.set_timeout(limit)
    # Also the time-out of the groups of a mesh.
    dist.distributed_c10d._get_default_timeout = lambda backend: limit
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def main() -> None:
    torch.set_num_threads(1)
    api, sharding, fault, stage, victim, folder = sys.argv[1:]
    # Without a fault, a slow rank must not cause an error.
    meet(timedelta(seconds=TO_MEET if fault == "none" else TIMEOUT))
    job = Job(api, sharding, fault if os.environ["RANK"] == victim else "none", stage, Path(folder))
    job.start()
    if fault == "none":
        job.resume()
    else:
        job.run_every_stage()
    job.finish()


if __name__ == "__main__":
    end_as_python_does(main)
