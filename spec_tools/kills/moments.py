"""Runs the tutorial on ranks that can be killed, and kills one at a chosen moment of a save.

The worker pool of the test harness cannot be used, since no rank survives. But its fork server can be used: each rank
is forked from a process that has already imported torch, so a run of six steps takes a second.

**Named moments.** A save is a sequence of file system calls, and only these calls have effects that the next run can
see. So an audit hook observes a rank: Python calls it *before* each of these calls. ``os.fsync`` has no audit event
and gets a wrapper instead. Each call gets a label, such as ``rename step-000004``, and the rank kills itself with
signal 9 before the chosen call. A limit of the operating system covers the middle of a file: the write that would
exceed the limit is cut off at exactly that byte.

**Timed moments.** The rank reports the start of a save, and the test kills it from outside some milliseconds later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spec_tests.harness import pool
from spec_tests.ports import free_port

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
STEPS, EVERY = 6, 2
TINY = ["--device=cpu", "--blocks=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--sample=1", "--lr=0.1"]
LIMIT = 90.0  # seconds for a run
GRACE = 30.0  # seconds for the survivors to detect that a rank has ended


@dataclass(frozen=True)
class Moment:
    """A moment of a save, and the rank that is killed at it.

    Attributes:
        name: used in the test's name.
        step: the step of the save.
        label: a regular expression for the label of a call. The rank is killed before this call.
        nth: index of the call among those that match, counted from 0.
        after_bytes: if not 0, kill after this many bytes of the file that the call opens, not before the call.
        seconds: if given, kill from outside, this long after the start of the save. Replaces the previous three.
        victim: the rank to kill.
        full: whether the save writes a full checkpoint.
    """

    name: str
    step: int = 4
    label: str = ""
    nth: int = 0
    after_bytes: int = 0
    seconds: float | None = None
    victim: int = 0
    full: bool = False

    def __str__(self) -> str:
        return f"{self.name} rank {self.victim} {'full' if self.full else 'sharded'}".replace(" ", "-")


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        codes: exit code of each rank; ``None`` for a rank that did not end in time.
        outputs: output of each rank.
        losses: return value of rank 0's ``train``, if it returned.
        calls: labels of all calls of each rank.
    """

    codes: list[int | None]
    outputs: list[str]
    losses: list[float] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)


def run(
    work: Path,
    *,
    save: Path | None,
    num_ranks: int = 2,
    full: bool = False,
    moment: Moment | None = None,
    options: Sequence[str] = (),
) -> Outcome:
    """Trains for six steps. Saves at every second step, and resumes if there is a checkpoint.

    Args:
        work: an empty folder for the output of the ranks.
        save: folder of the checkpoints.
        num_ranks: number of ranks.
        full: whether to save full checkpoints.
        moment: the moment and the rank to kill.
        options: further options of the tutorial.
    """
    work.mkdir(parents=True)
    pool.start_early()
    context = mp.get_context("forkserver")
    arguments = [*TINY, f"--steps={STEPS}", *options]
    if save is not None:
        arguments += [f"--save={save}", f"--resume={save}", f"--save-every={EVERY}", *(["--full"] if full else [])]
    mine, its = context.Pipe(duplex=False)
    port = free_port()
    processes = []
    for rank in range(num_ranks):
        killed_here = moment if moment is not None and moment.victim == rank else None
        target = (rank, num_ranks, port, arguments, work, save, killed_here, its)
        processes.append(context.Process(target=rank_main, args=target, daemon=True))
    try:
        for process in processes:
            process.start()
        its.close()
        if moment is not None and moment.seconds is not None:
            _kill_later(processes[moment.victim], mine, moment.seconds)
        _wait(processes, moment)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return _outcome(codes, work)


def _kill_later(process: Any, says: Any, seconds: float) -> None:
    if says.poll(LIMIT):
        with contextlib.suppress(EOFError):
            says.recv()
            time.sleep(seconds)
            os.kill(process.pid, signal.SIGKILL)


def _wait(processes: list[Any], moment: Moment | None) -> None:
    """All ranks must end by themselves. After a kill, the others have `GRACE` seconds."""
    deadline = time.monotonic() + LIMIT
    if moment is not None:
        processes[moment.victim].join(LIMIT)
        deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            # The rank prints a traceback that shows where it hangs.
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1.0)


def _outcome(codes: list[int | None], work: Path) -> Outcome:
    all_ranks = range(len(codes))
    outcome = Outcome(codes, [(work / f"output-{rank}").read_text() for rank in all_ranks])
    if (work / "losses").exists():
        outcome.losses = pickle.loads((work / "losses").read_bytes())
    for rank in all_ranks:
        path = work / f"calls-{rank}"
        outcome.calls.append(path.read_text().splitlines() if path.exists() else [])
    return outcome


# ---- on a rank ----


def rank_main(
    rank: int,
    num_ranks: int,
    port: int,
    arguments: list[str],
    work: Path,
    save: Path | None,
    moment: Moment | None,
    says: Any,
) -> None:
    """Runs the tutorial as one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(num_ranks)}
    output = os.open(work / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    sys.path.insert(0, str(TUTORIALS))
    import train_gpt

    options = train_gpt.parse(arguments)
    if save is not None:
        watch(save, work / f"calls-{rank}", moment)
    if moment is not None and moment.seconds is not None:
        train_gpt.save = announcing(train_gpt.save, moment.step, says)
    try:
        with train_gpt.joined_ranks("cpu") as place:
            losses = train_gpt.train(options, corpus(train_gpt), place)
            if moment is not None:
                time.sleep(LIMIT)  # a timed kill can come late
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Skip all cleanup: another rank has been killed, and threads that wait for it may never end.
        os._exit(1)
    if rank == 0:
        (work / "losses").write_bytes(pickle.dumps(losses))


def after_call(owner: Any, name: str, nth: int, action: Callable[[], None]) -> None:
    """Calls ``action`` after the ``nth`` call of a function."""
    original: Callable[..., Any] = getattr(owner, name)
    number = 0

    def counts(*arguments: Any, **options: Any) -> Any:
        nonlocal number
        number += 1
        result = original(*arguments, **options)
        if number == nth:
            action()
        return result

    setattr(owner, name, counts)


def resumed_training(train_gpt: Any, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """Trains for six steps, as one of the ranks of torchrun. Saves at every second step, and resumes.

    Returns:
        The losses, and the number of complete steps when the training began, if it has resumed.
    """
    begun_at = []
    resume = train_gpt.resume

    def resumed(checkpoint: Any, *arguments: Any, **options: Any) -> Any:
        begun_at.append(checkpoint.step)
        return resume(checkpoint, *arguments, **options)

    train_gpt.resume = resumed
    runs = folder / "runs"
    how = [f"--steps={STEPS}", f"--save-every={EVERY}", f"--save={runs}", f"--resume={runs}"]
    with train_gpt.joined_ranks("cpu") as place:
        losses = train_gpt.train(train_gpt.parse([*TINY, *how, *options]), corpus(train_gpt), place)
    return {"losses": losses, "begun at": begun_at}


def corpus(train_gpt: Any) -> Any:
    """A text of 4096 bytes, the same on every rank. Reading the real one takes longer than the training."""
    text = torch.randint(32, 127, (4096,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return train_gpt.Corpus(text, text, 2, "a text for tests")


def announcing(save: Any, step: int, says: Any) -> Any:
    """The tutorial's ``save``, which also notifies the test at the start of the save of ``step``."""

    def announced(checkpoints: Any, training: Any, **options: Any) -> Any:
        if training.step == step:
            says.send("now")
        return save(checkpoints, training, **options)

    return announced


def watch(save: Path, calls: Path, moment: Moment | None) -> None:
    """Logs each later call that changes something below ``save``, and kills this process at ``moment``."""
    log = os.open(calls, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen = 0

    def see(label: str) -> None:
        nonlocal seen
        os.write(log, f"{label}\n".encode())
        if moment is not None and moment.seconds is None and re.fullmatch(moment.label, label):
            if seen == moment.nth:
                cut_off(moment.after_bytes) if moment.after_bytes else die()
            seen += 1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        label = label_of(event, arguments, save)
        if label is not None:
            see(label)

    def fsync(number: Any, original: Any = os.fsync) -> None:
        number = number if isinstance(number, int) else number.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        if path.startswith(str(save)):
            see(f"fsync {Path(path).relative_to(save)}")
        original(number)

    os.fsync = fsync
    sys.addaudithook(hook)


def label_of(event: str, arguments: tuple[Any, ...], save: Path) -> str | None:
    """The label of a call, or ``None`` if it changes nothing below ``save``."""
    if event == "open":
        path, mode, flags = arguments
        writes = ("w" in mode) if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        return f"open {_below(path, save)}" if writes and _below(path, save) else None
    if event == "os.rename":
        return f"rename {_below(arguments[1], save)}" if _below(arguments[1], save) else None
    if event in ("os.mkdir", "os.rmdir"):
        return f"{event[3:]} {_below(arguments[0], save)}" if _below(arguments[0], save) else None
    # While a folder is emptied, file names are relative to it.
    if event == "os.remove":
        inside = _below(arguments[0], save) or ("a file" if arguments[1] != -1 else None)
        return f"remove {inside}" if inside else None
    return None


def _below(path: Any, save: Path) -> str | None:
    if not isinstance(path, str | os.PathLike):
        return None
    try:
        return Path(os.fspath(path)).relative_to(save).as_posix()
    except (ValueError, TypeError):
        return None


def die() -> None:
    """Kills this process immediately."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # Not reached. If the signal could come late, nothing must happen until then.


def cut_off(num_bytes: int) -> None:
    """Limits every file to ``num_bytes``: the first write beyond the limit is cut off, and this process ends."""
    signal.signal(signal.SIGXFSZ, lambda *_: die())
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
