"""The state of a training, and how it is saved and restored.

A training must resume *exactly*, to the last bit. The weights alone are not enough. The next step needs:

=====================  ===============================================  =====================
part                   why                                              where
=====================  ===============================================  =====================
model, optimizer       weights, and the two averages of AdamW           every rank, its rows
step, losses           the next step, and the loss curve so far         same on all ranks
scheduler              the next learning rate                           same on all ranks
scaler, if any         the scale of float16 gradients                   same on all ranks
position in the data   is the step: a batch is a function of the step   same on all ranks
random state           of Python, NumPy, torch, and the GPU             different on each rank
=====================  ===============================================  =====================

There are two forms::

    sharded   __0_0.distcp  __1_0.distcp  .metadata  progress.pt  manifest.json    each rank writes its shards
    full      full.pt                                             manifest.json    rank 0 writes, the others wait

`torch.distributed.checkpoint` writes the sharded form. For each tensor, it records which file contains which rows. So
two ranks can load a checkpoint of four ranks: each rank reads its own rows from the files of all ranks. Worked example
with 8 rows::

    written by 4    rows 0 1 | 2 3 | 4 5 | 6 7
    read by 2       rows 0 1   2 3 | 4 5   6 7        each rank reads two files

The full form is one file that any program can read. Every rank maps it into memory and reads its part. To save it, rank
0 needs memory for the whole model and for the state of the optimizer, which is twice as large.

If the number of ranks changes, the weights are the same, but the windows of the global batches differ. Ranks that exist
in the checkpoint restore their random states. A new rank keeps its initial random state.

**A checkpoint is loaded completely or not at all.** All ranks first compare the checksums (see `checkpoint`), the
settings of the model, and every key and shape. Then they read the values into new memory. They change the model only
after this succeeds.

**No code runs from a checkpoint** (see `no_code`), but resume only from checkpoints that you trust.

*In torch:* `torch.distributed.checkpoint.state_dict` combines the states of model and optimizer. The user must find,
verify and select checkpoints.

Spec: TRAIN-09, TRAIN-10, TRAIN-11, TRAIN-12.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .apis import Api, State
from .checkpoint import Checkpoint, CheckpointFolder
from .manifest import MANIFEST, Flaw, differences
from .no_code import Planner, Reader
from .ranks import from_all_ranks, on_first_rank, together

try:
    import numpy
except ImportError:  # Without NumPy, there is no NumPy random state to save.
    numpy = None  # type: ignore[assignment]

__all__ = ["Training", "resume", "save"]

FULL, PROGRESS, METADATA = "full.pt", "progress.pt", ".metadata"


@dataclass
class Training:
    """Everything that changes while a model is trained.

    Attributes:
        model: the sharded model.
        optimizer: the optimizer of the model.
        api: gets and sets the state; see `apis`.
        scheduler: the learning rate scheduler.
        scaler: the gradient scaler, for float16.
        step: number of completed steps, which is also the position in the data.
        losses: the losses of these steps.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    api: Api
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    scaler: Any = None
    step: int = 0
    losses: list[float] = field(default_factory=list)

    def finish_step(self, loss: float) -> None:
        """Counts a step of the optimizer."""
        if self.scheduler is not None:
            self.scheduler.step()
        self.losses.append(loss)
        self.step += 1


def save(
    checkpoints: CheckpointFolder, training: Training, *, fixed: Mapping[str, Any], noted: Mapping[str, Any], full: bool
) -> Path:
    """Saves the training to ``checkpoints``. Every rank must call it. It returns when the checkpoint is complete.

    Args:
        checkpoints: the folder of checkpoints.
        training: the training to save.
        fixed: settings that must be the same when a run resumes, such as the sizes of the model.
        noted: settings that can differ when a run resumes; `resume` returns the differences.
        full: rank 0 writes one file. Otherwise each rank writes a file.

    Returns:
        The folder of the checkpoint.
    """
    state = training.api.get_state(training.model, training.optimizer, full=full)
    progress = _progress_of(training)

    def write(folder: Path) -> None:
        if full:
            on_first_rank(lambda: torch.save({**state, "progress": progress}, folder / FULL))
            return
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
        on_first_rank(lambda: torch.save(progress, folder / PROGRESS))

    facts = {
        "form": "full" if full else "sharded",
        "fixed": {**fixed, "optimizer": type(training.optimizer).__name__},
        "noted": {"ranks": dist.get_world_size(), **noted},
    }
    return checkpoints.save(training.step, facts, write)


def resume(
    checkpoint: Checkpoint, training: Training, *, fixed: Mapping[str, Any], noted: Mapping[str, Any]
) -> list[str]:
    """Restores the training from a checkpoint. Every rank must call it.

    Args:
        checkpoint: from `choose` or `CheckpointFolder.newest`.
        training: a new training. Its model can be sharded over a different number of ranks.
        fixed: as in `save`.
        noted: as in `save`.

    Returns:
        Remarks about the settings in ``noted`` that differ.

    Raises:
        CheckpointError: the checkpoint does not fit. Every rank raises it, and the training is unchanged.
    """
    fixed = {**fixed, "optimizer": type(training.optimizer).__name__}
    checkpoint.refuse_if(differences(fixed, checkpoint.facts.get("fixed", {}), file=MANIFEST))
    full = checkpoint.facts["form"] == "full"
    state, progress = (_read_full if full else _read_sharded)(checkpoint, training)
    checkpoint.refuse_if(_flaws_of_progress(progress, training, FULL if full else PROGRESS))

    training.api.set_state(training.model, training.optimizer, state, full=full)
    _take_up(training, progress)
    now = {"ranks": dist.get_world_size(), **noted}
    return [
        f"{flaw.key} was {flaw.found}, and is {flaw.expected} now"
        for flaw in differences(now, checkpoint.facts["noted"], file=MANIFEST)
    ]


# ---- the full form ----


def _read_full(checkpoint: Checkpoint, training: Training) -> tuple[State, dict[str, Any]]:
    # Map the file: a rank reads only its shards, and all ranks of a machine share the pages of the file.
    path = checkpoint.folder / FULL
    state = together(lambda: torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    ours = _shapes(training.api.get_state(training.model, training.optimizer, full=False)["model"])
    optim = {name: _shapes(values) for name, values in state["optim"]["state"].items()}
    flaws = differences(ours, _shapes(state["model"]), file=FULL, prefix="model.")
    checkpoint.refuse_if(flaws + _flaws_of_optimizer(ours, optim, FULL))
    return state, state["progress"]


# ---- the sharded form ----


def _read_sharded(checkpoint: Checkpoint, training: Training) -> tuple[State, dict[str, Any]]:
    progress = together(lambda: torch.load(checkpoint.folder / PROGRESS, map_location="cpu", weights_only=True))
    metadata = together(lambda: Reader(checkpoint.folder).read_metadata())
    ours = training.api.get_state(training.model, training.optimizer, full=False)["model"]
    theirs: State = {"model": {}, "optim": {"state": {}}}
    for path, entry in _entries(metadata):
        if isinstance(entry, TensorStorageMetadata):
            _put(theirs, path, tuple(entry.size))
    flaws = differences(_shapes(ours), theirs["model"], file=METADATA, prefix="model.")
    checkpoint.refuse_if(flaws + _flaws_of_optimizer(_shapes(ours), theirs["optim"]["state"], METADATA))
    state = _room_for(metadata, ours)
    dcp.load(state, storage_reader=Reader(checkpoint.folder), planner=Planner())
    return state, progress


def _room_for(metadata: Metadata, ours: Mapping[str, Tensor]) -> State:
    """A state with the structure of the checkpoint and new memory, to read into.

    The tensors of the model are sharded like those of the current model. A new optimizer has no state yet, so the
    checkpoint determines its entries. A tensor with the shape of its parameter is sharded like the parameter.
    """
    state: State = {"model": {}, "optim": {"state": {}, "param_groups": []}}
    for path, entry in _entries(metadata):
        if not isinstance(entry, TensorStorageMetadata):
            _put(state, path, None)  # Not a tensor, for example a learning rate or a list of names.
            continue
        like = ours.get(path[1] if path[0] == "model" else path[2])
        cut = like is not None and like.shape == entry.size
        dtype = entry.properties.dtype
        _put(state, path, torch.empty_like(like, dtype=dtype) if cut else torch.empty(entry.size, dtype=dtype))
    return state


def _entries(metadata: Metadata) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The entries of the checkpoint: the path of each value in the nested state, such as ``("model", "norm.bias")``."""
    for key, entry in metadata.state_dict_metadata.items():
        yield metadata.planner_data[key], entry


def _put(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Sets a value in nested dictionaries and lists of dictionaries, and creates them as needed."""
    for key, following in itertools.pairwise(path):
        if isinstance(root, list):
            root.extend({} for _ in range(key + 1 - len(root)))
            root = root[key]
        else:
            root = root.setdefault(key, [] if isinstance(following, int) else {})
    root[path[-1]] = value


# ---- comparing ----


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor)}


def _flaws_of_optimizer(parameters: Mapping[str, Any], optim: Mapping[str, Any], file: str) -> list[Flaw]:
    """Flaws for states of missing parameters, or with a wrong shape. Scalars, such as the step count, always fit."""
    flaws = [Flaw(file, f"optim.state.{name}", "nothing", "a state") for name in optim if name not in parameters]
    for name, values in optim.items():
        for kind, shape in values.items():
            if name in parameters and shape not in (parameters[name], (), (1,)):
                flaws.append(Flaw(file, f"optim.state.{name}.{kind}", parameters[name], shape))
    return flaws


def _flaws_of_progress(progress: Mapping[str, Any], training: Training, file: str) -> list[Flaw]:
    ours = {"scheduler": training.scheduler is not None, "scaler": training.scaler is not None}
    theirs = {part: progress.get(part) is not None for part in ours}
    return differences(ours, theirs, file=file, prefix="progress.")


# ---- counters and random state ----


def _progress_of(training: Training) -> dict[str, Any]:
    return {
        "step": training.step,
        "losses": training.losses,
        "scheduler": training.scheduler and training.scheduler.state_dict(),
        "scaler": training.scaler and training.scaler.state_dict(),
        "random": from_all_ranks(_random_state()),
    }


def _take_up(training: Training, progress: Mapping[str, Any]) -> None:
    training.step, training.losses[:] = progress["step"], progress["losses"]
    if training.scheduler is not None:
        training.scheduler.load_state_dict(progress["scheduler"])
    if training.scaler is not None:
        training.scaler.load_state_dict(progress["scaler"])
    if dist.get_rank() < len(progress["random"]):
        _set_random_state(progress["random"][dist.get_rank()])


def _random_state() -> dict[str, Any]:
    """The random state of this rank. It contains only numbers and tensors, so loading it runs no code."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(tuple(state["numpy"]))
