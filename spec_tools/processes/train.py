"""The tutorial's training on ranks of which one has a fault, or several one after the other.

    python -m spec_tools.processes.train FOLDER FORM MOMENTS OPTIONS ...
    torchrun --max-restarts 1 spec_tools/processes/train.py FOLDER FORM MOMENTS OPTIONS ...

A run has six steps, and saves after every second one to ``FOLDER/runs``, as ``full`` or ``sharded`` checkpoints; with
the form ``none`` it does not save. It resumes from the newest checkpoint. ``MOMENTS`` is JSON, a list of `Moment`: the
first start has the first fault, the next start the second one. When a fault occurs, its rank creates
``FOLDER/struck-0``, or ``struck-1`` for the second one. At the end rank 0 writes the losses, and the number of complete
steps when it resumed, to ``FOLDER/result``.

**Events.** A rank reports an event before each file system call that changes something in the folder of checkpoints,
because only these calls have effects that the next run can see. Python calls an audit hook before each of them, and
``os.fsync`` gets a wrapper. Each event has a label::

    rename step-000004    open .step-000004.part/__0_0.distcp    fsync .newest.part    ...
    save 4                the save after step 4 begins
    loss                  between forward and backward of a step
    written               this rank has written its files in a save, and the others wait for its message

``FOLDER/events-0`` has the labels of rank 0.

Each batch has four parts, whatever the number of ranks. So two ranks train with the same values as four.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tutorials"), str(ROOT)]

from spec_tools.processes.faults import calling, commit  # noqa: E402
from spec_tools.processes.ranks import end_as_python_does  # noqa: E402

STEPS, EVERY = 6, 2
TINY = ["--device=cpu", "--blocks=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--sample=1", "--lr=0.1"]
PARTS = 4  # of a batch
TIMEOUT = 20.0  # seconds, of all groups; torch's half an hour is too long for a test
CUT_TIMEOUT = 5.0  # after the first loss of a start in which the link to another machine is cut


@dataclass(frozen=True)
class Moment:
    """A moment of a training, the rank that has a fault at it, and the fault.

    Attributes:
        name: for people.
        label: a regular expression for the label of an event. The fault occurs at this event.
        nth: index of the event among those that match, counted from 0.
        victim: the rank that has the fault.
        fault: one of `FAULTS`, or ``"is cut off"``: the rank waits until ``FOLDER/cut-0`` exists.
    """

    name: str
    label: str
    nth: int = 0
    victim: int = 0
    fault: str = "is killed"


class Events:
    """The events of this rank.

    Args:
        folder: of the job.
        rank: this rank.
        moments: the moments of all starts.
    """

    def __init__(self, folder: Path, rank: int, moments: list[Moment]) -> None:
        self._runs = folder / "runs"
        self._log = os.open(folder / f"events-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        start = len([*folder.glob("struck-*")])
        self._mark, self._cut = folder / f"struck-{start}", folder / f"cut-{start}"
        moment = moments[start] if start < len(moments) else None
        self._is_cut_off = moment is not None and moment.fault == "is cut off"
        self._moment = moment if moment is not None and moment.victim == rank else None
        self._num_seen = 0

    def see(self, label: str) -> None:
        os.write(self._log, f"{label}\n".encode())
        if self._is_cut_off and label == "loss":
            # A rank may start late, but must not wait long for a machine that is out of reach.
            for group in list(dist.distributed_c10d._world.pg_map):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=CUT_TIMEOUT), group)
        moment = self._moment
        if moment is None or not re.fullmatch(moment.label, label):
            return
        self._num_seen += 1
        if self._num_seen == moment.nth + 1:
            self._strike(moment)

    def _strike(self, moment: Moment) -> None:
        self._moment = None
        self._mark.touch()
        if moment.fault == "is cut off":
            while not self._cut.exists():
                time.sleep(0.05)
        else:
            commit(moment.fault, 3 * TIMEOUT)

    def watch_files(self) -> None:
        """Sees each later call that changes something below the folder of checkpoints."""
        sys.addaudithook(self._before_call)
        flush = os.fsync

        def fsync(number: Any) -> None:
            number = number if isinstance(number, int) else number.fileno()
            self._see_path("fsync", os.readlink(f"/proc/self/fd/{number}"))
            flush(number)

        os.fsync = fsync

    def _before_call(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if ("w" in mode) if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._see_path("open", path)
        elif event == "os.rename":
            self._see_path("rename", arguments[1])
        elif event == "os.mkdir":
            self._see_path("mkdir", arguments[0])
        elif event == "os.remove" and arguments[1] != -1:
            # While a folder is emptied, file names are relative to it.
            self.see("remove a file")

    def _see_path(self, call: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(self._runs):
            self.see(f"{call} {Path(path).relative_to(self._runs)}")


def train(folder: Path, form: str, events: Events, options: list[str]) -> dict[str, Any]:
    """The losses, and the number of complete steps from which this run has resumed."""
    import train_gpt

    # The same text on every rank. Reading the real one takes longer than the training.
    text = torch.randint(32, 127, (4096,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    corpus = train_gpt.Corpus(text, text, 2, "a text for tests")
    runs, begun_at = folder / "runs", []
    if form != "none":
        options += [f"--save={runs}", f"--resume={runs}", f"--save-every={EVERY}", *["--full"] * (form == "full")]
    batch_of, save, resume = train_gpt.batch_of, train_gpt.save, train_gpt.resume

    def batch_of_parts(*arguments: Any, rank: int, **named: Any) -> tuple[torch.Tensor, ...]:
        num_parts = PARTS // dist.get_world_size()
        parts = [batch_of(*arguments, rank=rank * num_parts + part, **named) for part in range(num_parts)]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def announced_save(checkpoints: Any, training: Any, **named: Any) -> Any:
        events.see(f"save {training.step}")
        return save(checkpoints, training, **named)

    def noted_resume(checkpoint: Any, *arguments: Any, **named: Any) -> Any:
        begun_at.append(checkpoint.step)
        return resume(checkpoint, *arguments, **named)

    train_gpt.batch_of, train_gpt.save, train_gpt.resume = batch_of_parts, announced_save, noted_resume
    with ExitStack() as stack:
        stack.enter_context(calling(train_gpt.F, "cross_entropy", after=lambda: events.see("loss")))
        stack.enter_context(calling(dcp.FileSystemWriter, "write_data", after=lambda: events.see("written")))
        place = stack.enter_context(train_gpt.joined_ranks("cpu"))
        losses = train_gpt.train(train_gpt.parse([*TINY, f"--steps={STEPS}", *options]), corpus, place)
    return {"losses": losses, "resumed at": begun_at}


def main() -> None:
    torch.set_num_threads(1)
    folder, form, moments, *options = Path(sys.argv[1]), *sys.argv[2:]
    dist.distributed_c10d._get_default_timeout = lambda backend: timedelta(seconds=TIMEOUT)
    rank = int(os.environ["RANK"])
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        # On several machines. If torchrun starts the ranks again without counting a failure, it replaces its own logs.
        start = len([*folder.glob("struck-*")])
        errors = os.open(folder / f"errors-{start}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(errors, sys.stderr.fileno())
    events = Events(folder, rank, [Moment(**fields) for fields in json.loads(moments)])
    events.watch_files()
    result = train(folder, form, events, options)
    if rank == 0:
        (folder / "result").write_text(json.dumps(result))


if __name__ == "__main__":
    end_as_python_does(main)
