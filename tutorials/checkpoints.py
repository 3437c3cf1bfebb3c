"""Checkpoints: save and resume a training, also on fewer ranks and with another library.

    torchrun --standalone --nproc-per-node 2 tutorials/checkpoints.py

Output: the losses of resumed trainings, which are equal to those of a training without interruption.

It takes some seconds on two CPU cores. The script interrupts a training, resumes it in several ways, and compares each
result with a training without interruption.

1. **Resume from a full checkpoint.** Rank 0 writes one file with the names and shapes of the plain model. But *all*
   ranks must call ``state_dict()``, because each rank stores a shard. If one rank does not call it, the other ranks
   hang. A checkpoint must contain more than the weights: the averages of the optimizer, the state of the learning rate
   schedule, the scale of float16 and the step number. Otherwise the losses differ from those of the original training.
   To resume, rank 0 loads the weights into the plain model *before* wrapping, and
   ``sync_module_states`` broadcasts them unit by unit. ``broadcast_object_list(list, src=0)`` broadcasts small values
   that are not tensors. It *fills* the list, which must have the same length on all ranks, and returns nothing.
2. **The optimizer's own state dict contains local shards.** ``optimizer.state_dict()`` stores flat shards under
   numbers, and each rank has different shards. ``FSDP.optim_state_dict`` converts it to the state of an optimizer of
   the plain model, with names as keys. ``FSDP.optim_state_dict_to_load`` does the reverse. If all ranks load the dict
   of rank 0 directly, there is no error, but all other ranks get the averages of wrong weights.
3. **Resume on fewer ranks from a sharded checkpoint.** For a large model, writing one file is too slow, and the memory
   of one host is too small. With ``torch.distributed.checkpoint``, each rank writes its rows, and reads the rows that
   it needs from the files of all ranks. It reads *into* existing tensors. A new optimizer has no averages yet, so a
   step with a learning rate of 0 creates them first.
4. **Continue with a different library.** DDP, FullyShardedDataParallel and fully_shard train one after the other. Each
   continues from the full state of the previous one. The full state on rank 0, with names as keys, is the only form
   that all three can save and load.

See `gpt/checkpoint.py` for checkpoints that stay valid if a process is killed while it writes.

Spec: TRAIN-09 to TRAIN-13, TRAIN-27, MIG-20, MYTH-24, OSD-01, OSD-LOAD-01.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Block, Net, Place, from_all_ranks, on_ranks, say, shared_folder
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR

from minifsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedGradScaler,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.wrap import ModuleWrapPolicy

WIDTH, NUM_BLOCKS, BATCH, STEPS_PER_EPOCH = 12, 3, 24, 2
State = dict[str, Any]


def plain(seed: int, place: Place) -> Net:
    torch.manual_seed(seed)
    return Net(WIDTH, NUM_BLOCKS).to(place.device)


@dataclass
class Run:
    """A training run and its progress.

    Args:
        group: the ranks that train together; ``None`` for all.
        alone: every rank trains like a single process, on whole batches.
    """

    model: nn.Module
    place: Place
    group: dist.ProcessGroup | None = None
    step: int = 0
    alone: bool = False
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = StepLR(self.optimizer, step_size=STEPS_PER_EPOCH, gamma=0.5)
        # In float32, a scale that is a power of two does not change the result. The checkpoint must contain it.
        self.scaler = ShardedGradScaler(
            self.place.device.type, init_scale=4.0, growth_interval=3, process_group=self.group
        )

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self.step // STEPS_PER_EPOCH

    def train(self, until: int) -> list[float]:
        """Trains up to step ``until``; returns the losses of these steps, each the mean over the group."""
        rank, size = (0, 1) if self.alone else (dist.get_rank(self.group), dist.get_world_size(self.group))
        begun = len(self.losses)
        for step in range(self.step, until):
            # The global batch is the same for any number of ranks.
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(self.place.device)
            mine = x.chunk(size)[rank]
            loss = nn.functional.mse_loss(self.model(mine), mine.roll(1, dims=1))
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.step = step + 1
            total = loss.detach().clone()
            if not self.alone:
                dist.all_reduce(total, group=self.group)
            self.losses.append(total.item() / size)
        return self.losses[begun:]


def sharded(model: nn.Module, place: Place, **options: Any) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=place.device, **options)


# ---- 1. a full checkpoint ----

FULL = (
    StateDictType.FULL_STATE_DICT,
    FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
    FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
)


def full_state(run: Run) -> State:
    """The full state on rank 0, and the same dict without tensors on the other ranks. Every rank must call it."""
    with FSDP.state_dict_type(run.model, *FULL):
        return {
            "model": run.model.state_dict(),
            "optimizer": FSDP.optim_state_dict(run.model, run.optimizer),
            "scheduler": run.scheduler.state_dict(),
            "scaler": run.scaler.state_dict(),
            "step": run.step,
            "epoch": run.epoch,
        }


def resumed(file: Path, place: Place) -> Run:
    """A training resumed from a file that only rank 0 reads. Every rank must call it."""
    # Each rank uses a different seed, so correct weights can only come from the file.
    model = plain(100 + place.rank, place)
    state: State = torch.load(file, map_location="cpu") if place.rank == 0 else {}
    if place.rank == 0:
        model.load_state_dict(state["model"])
    run = Run(sharded(model, place, sync_module_states=True), place)
    with FSDP.state_dict_type(run.model, *FULL):
        optimizer = FSDP.optim_state_dict_to_load(run.model, run.optimizer, state.get("optimizer", {}))
    run.optimizer.load_state_dict(optimizer)
    small = [state.get(name) for name in ("scheduler", "scaler", "step", "epoch")]
    returned = dist.broadcast_object_list(small, src=0)
    assert returned is None, "the method fills the list"
    scheduler, scaler, run.step, epoch = small
    run.scheduler.load_state_dict(scheduler)
    run.scaler.load_state_dict(scaler)
    assert epoch == run.epoch
    return run


def lesson_full(place: Place, folder: Path, expected: list[float]) -> None:
    run = Run(sharded(plain(0, place), place), place)
    run.train(3)
    state = full_state(run)
    if place.rank == 0:
        torch.save(state, folder / "full.pt")
    dist.barrier()  # No rank reads before the file is written.
    again = resumed(folder / "full.pt", place)
    went_on, resumed_losses = run.train(6), again.train(6)
    say(place, "1. Save a full checkpoint after step 3. Losses of steps 4 to 6:")
    say(place, f"     without interruption  {' '.join(f'{loss:.6f}' for loss in went_on)}")
    say(place, f"     resumed from file     {' '.join(f'{loss:.6f}' for loss in resumed_losses)}")
    say(place, f"   The resumed run is at step {again.step}, epoch {again.epoch}.")
    names = from_all_ranks((len(state["model"]), len(state["optimizer"].get("state", {}))))
    say(place, "   With rank0_only=True, only rank 0 has entries in the dicts:")
    for rank, (num_weights, num_states) in enumerate(names):
        say(place, f"     rank {rank}: {num_weights} weights, optimizer state of {num_states} weights")
    assert resumed_losses == went_on, "equal to the last bit"
    assert all(abs(one - other) < 1e-5 * other for one, other in zip(run.losses, expected, strict=False))
    assert names == [(14, 14)] + [(0, 0)] * (place.num_ranks - 1)
    assert again.scaler.get_scale() == run.scaler.get_scale() == 16.0
    assert again.scheduler.get_last_lr() == run.scheduler.get_last_lr() == [1e-2 * 0.5**3]


# ---- 2. the optimizer's own state dict ----


def lesson_untranslated(place: Place) -> None:
    run = Run(sharded(plain(0, place), place), place)
    run.train(2)
    before = from_all_ranks([state["exp_avg"].cpu() for state in run.optimizer.state.values()])
    box = [run.optimizer.state_dict()]
    dist.broadcast_object_list(box, src=0)
    run.optimizer.load_state_dict(box[0])
    after = from_all_ranks([state["exp_avg"].cpu() for state in run.optimizer.state.values()])
    shapes = [tuple(value.shape) for value in before[0]]
    say(
        place,
        "2. optimizer.state_dict() contains this rank's flat shards, with numbers instead of names. Shapes on rank 0:",
    )
    say(place, f"     {', '.join(f'{number}: {shape}' for number, shape in enumerate(shapes))}")
    say(
        place,
        "   If all ranks load rank 0's dict: no error, and rank 1 has the optimizer state of rank 0's shards (wrong).",
    )
    assert all(map(torch.equal, after[1], before[0]))
    assert not any(map(torch.equal, after[1], before[1]))


# ---- 3. a sharded checkpoint, on fewer ranks ----


# DTensors. The default is ShardedTensor, which torch has deprecated. torch needs a wrapper with a `device_mesh`, which
# always saves DTensors.
SHARDED = (
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(_use_dtensor=True),
    ShardedOptimStateDictConfig(_use_dtensor=True),
)


def sharded_state(run: Run) -> State:
    """The sharded state. Every rank of the run's group must call it; each gets its own rows."""
    with FSDP.state_dict_type(run.model, *SHARDED):
        return {"model": run.model.state_dict(), "optimizer": FSDP.optim_state_dict(run.model, run.optimizer)}


def read_sharded(run: Run, folder: Path) -> None:
    """Loads a sharded checkpoint. Every rank of the run's group must call it."""
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.optimizer.step()
    run.optimizer.zero_grad()
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    state = sharded_state(run)
    dcp.load(state, checkpoint_id=folder, process_group=run.group)
    with FSDP.state_dict_type(run.model, *SHARDED):
        run.model.load_state_dict(state["model"])
        loadable = FSDP.optim_state_dict_to_load(run.model, run.optimizer, state["optimizer"])
    run.optimizer.load_state_dict(loadable)


def lesson_sharded(place: Place, folder: Path, expected: list[float]) -> None:
    run = Run(sharded(plain(0, place), place), place)
    run.train(3)
    dcp.save(sharded_state(run), checkpoint_id=folder / "sharded")
    files = sorted(path.name for path in (folder / "sharded").iterdir())
    num_fewer = max(1, place.num_ranks // 2)
    fewer = dist.new_group(list(range(num_fewer)))
    losses: list[float] = []
    if place.rank < num_fewer:
        # A single rank cannot shard. The form of the checkpoint does not depend on the strategy.
        strategy = ShardingStrategy.FULL_SHARD if num_fewer > 1 else ShardingStrategy.NO_SHARD
        model = sharded(plain(100, place), place, process_group=fewer, sharding_strategy=strategy)
        again = Run(model, place, group=fewer)
        read_sharded(again, folder / "sharded")
        again.step = 3
        again.scheduler.load_state_dict(run.scheduler.state_dict())
        losses = again.train(6)
    losses = from_all_ranks(losses)[0]
    say(place, f"3. Save a sharded checkpoint after step 3 on {place.num_ranks} ranks. Files: {', '.join(files)}")
    say(place, f"   Load it on {num_fewer}. Losses of steps 4 to 6:")
    say(place, f"     resumed               {' '.join(f'{loss:.6f}' for loss in losses)}")
    assert all(abs(one - other) < 1e-5 * other for one, other in zip(losses, expected[3:6], strict=True))


# ---- 4. continue with a different library ----


@dataclass
class PassedState:
    """The state that one library passes to the next: the full state on rank 0, the step number on all ranks."""

    step: int
    weights: State = field(default_factory=dict)
    optimizer: State = field(default_factory=dict)


OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def train_with_ddp(state: PassedState, until: int, place: Place) -> tuple[PassedState, list[float]]:
    model = plain(100, place)
    by_number = [None]
    if place.rank == 0:
        model.load_state_dict(state.weights)
        by_number = [FSDP.rekey_optim_state_dict(state.optimizer, OptimStateKeyType.PARAM_ID, model)]
    # DDP broadcasts the weights. The script must broadcast the state of the optimizer.
    run = Run(DDP(model), place, step=state.step)
    dist.broadcast_object_list(by_number, src=0)
    if by_number[0]["state"]:
        run.optimizer.load_state_dict(by_number[0])
    losses = run.train(until)
    by_name = FSDP.rekey_optim_state_dict(run.optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model)
    return PassedState(until, model.state_dict(), by_name), losses


def train_with_fsdp(state: PassedState, until: int, place: Place) -> tuple[PassedState, list[float]]:
    model = plain(100 + place.rank, place)
    if place.rank == 0:
        model.load_state_dict(state.weights)
    run = Run(sharded(model, place, sync_module_states=True), place, step=state.step)
    with FSDP.state_dict_type(run.model, *FULL):
        run.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(run.model, run.optimizer, state.optimizer))
    losses = run.train(until)
    full = full_state(run)
    return PassedState(until, full["model"], full["optimizer"]), losses


def train_with_fully_shard(state: PassedState, until: int, place: Place) -> tuple[PassedState, list[float]]:
    model = plain(100, place)
    for block in model.blocks:
        fully_shard(block)
    run = Run(fully_shard(model), place, step=state.step)
    set_model_state_dict(run.model, state.weights, options=FROM_RANK_0)
    set_optimizer_state_dict(run.model, run.optimizer, state.optimizer, options=FROM_RANK_0)
    losses = run.train(until)
    weights = get_model_state_dict(run.model, options=OPTIONS)
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=OPTIONS)
    return PassedState(until, weights, optimizer), losses


def lesson_libraries(place: Place) -> None:
    parts = (train_with_ddp, train_with_fsdp, train_with_fully_shard, train_with_fsdp, train_with_ddp)
    first = Run(plain(0, place), place)
    state = PassedState(0, first.model.state_dict(), first.optimizer.state_dict())
    losses: list[float] = []
    for number, part in enumerate(parts, start=1):
        state, of_part = part(state, 2 * number, place)
        losses += of_part
    names = ", ".join(part.__name__.removeprefix("train_with_") for part in parts)
    say(place, f"4. Train for two steps each with {names}. Each loads the state of the previous one. Losses:")
    say(place, f"     five parts        {' '.join(f'{loss:.4f}' for loss in losses)}")
    # Each part starts a new schedule, so the single process does the same.
    single: list[float] = []
    run = Run(plain(0, place), place, alone=True)
    for number in range(1, len(parts) + 1):
        run.scheduler = StepLR(run.optimizer, step_size=STEPS_PER_EPOCH, gamma=0.5)
        single += run.train(2 * number)
    say(place, f"     a single process  {' '.join(f'{loss:.4f}' for loss in single)}")
    assert all(abs(one - other) < 1e-4 * other for one, other in zip(losses, single, strict=True))


def lesson(place: Place) -> None:
    # torch deprecated `state_dict_type`. Sections 1, 3 and 4 show how to use it, because many programs do. So this
    # program ignores the warning. Programs that use `get_state_dict` and `set_state_dict` need no form.
    warnings.filterwarnings("ignore", r".*FSDP\.state_dict_type", FutureWarning)
    expected = Run(plain(0, place), place, alone=True).train(6)
    with shared_folder() as folder:
        lesson_full(place, folder, expected)
        lesson_untranslated(place)
        lesson_sharded(place, folder, expected)
    lesson_libraries(place)


if __name__ == "__main__":
    on_ranks(lesson)
