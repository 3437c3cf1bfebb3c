"""Runs the tutorial on ranks that can be killed, and kills one at a chosen moment of a save.

The pool of the harness is no use here, since nobody survives. But its fork server is: a rank is a copy of a process
that has torch already, and a run of six steps takes a second.

**Named moments.** A save is a sequence of calls to the file system, and nothing but these calls can be seen by the
next run. So a rank is watched by an audit hook, which Python calls *before* each of them, and by a wrapper around
``os.fsync``, which has no audit event. Each call gets a label, such as ``rename step-000004``, and the rank kills
itself by signal 9 when the chosen one comes. What is in the middle of a file is reached by a limit of the operating
system: the write that would pass it is cut off there, to the byte.

**Timed moments.** The rank says when a save begins, and the test kills it from outside, some milliseconds later.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spec_tests.harness import pool

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
STEPS, EVERY = 6, 2
TINY = ["--device=cpu", "--blocks=1", "--width=16", "--heads=2", "--context=16", "--batch=2", "--sample=1", "--lr=0.1"]
LIMIT = 90.0  # seconds for a run
GRACE = 30.0  # seconds for the survivors to notice that one of them is gone


@dataclass(frozen=True)
class Moment:
    """When to kill whom.

    Attributes:
        name: for the test's name.
        step: the save in which it happens.
        label: a pattern for the call before which it happens.
        nth: of the calls that match, counted from 0.
        after_bytes: not before the call, but so many bytes into the file that it opens.
        seconds: instead of all that, so long after the begin of the save, from outside.
        victim: the rank.
        full: in a save of which form.
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
    """What became of a run.

    Attributes:
        codes: exit code of each rank; ``None`` for one that had not ended when its time was over.
        outputs: of each rank.
        losses: what rank 0's ``train`` gave back, if it did.
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
    """Trains for six steps, saving every second one and resuming if there is something to resume from.

    Args:
        work: an empty folder for what the ranks have to say.
        save: folder of the checkpoints.
        num_ranks: how many ranks.
        full: whether to save in the full form.
        moment: when to kill whom.
        options: more of the tutorial's.
    """
    work.mkdir(parents=True)
    pool.start_early()
    context = mp.get_context("forkserver")
    arguments = [*TINY, f"--steps={STEPS}", *options]
    if save is not None:
        arguments += [f"--save={save}", f"--resume={save}", f"--save-every={EVERY}", *(["--full"] if full else [])]
    mine, its = context.Pipe(duplex=False)
    port = pool.free_port()
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
    """All must end by themselves; where one is killed, the others have the grace period from then on."""
    deadline = time.monotonic() + LIMIT
    if moment is not None:
        processes[moment.victim].join(LIMIT)
        deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            # Its output is to say where it hangs.
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1.0)


def _outcome(codes: list[int | None], work: Path) -> Outcome:
    everybody = range(len(codes))
    outcome = Outcome(codes, [(work / f"output-{rank}").read_text() for rank in everybody])
    if (work / "losses").exists():
        outcome.losses = pickle.loads((work / "losses").read_bytes())
    for rank in everybody:
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
                time.sleep(LIMIT)  # A timed kill may come late, but it will come.
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Without saying good-bye: another rank is dead, and threads that wait for it may not want to end.
        os._exit(1)
    if rank == 0:
        (work / "losses").write_bytes(pickle.dumps(losses))


def corpus(train_gpt: Any) -> Any:
    """A text of 4096 bytes, the same on every rank. The real one takes longer to read than the training takes."""
    text = torch.randint(32, 127, (4096,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return train_gpt.Corpus(text, text, 2, "a text for tests")


def announcing(save: Any, step: int, says: Any) -> Any:
    """The tutorial's ``save``, which tells the test when it begins to save this step."""

    def announced(shelf: Any, training: Any, **options: Any) -> Any:
        if training.step == step:
            says.send("now")
        return save(shelf, training, **options)

    return announced


def watch(save: Path, calls: Path, moment: Moment | None) -> None:
    """From now on writes down each call that changes something below ``save``, and kills this process at ``moment``."""
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
    """Names a call, or ``None`` if it changes nothing below ``save``."""
    if event == "open":
        path, mode, flags = arguments
        writes = ("w" in mode) if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        return f"open {_below(path, save)}" if writes and _below(path, save) else None
    if event == "os.rename":
        return f"rename {_below(arguments[1], save)}" if _below(arguments[1], save) else None
    if event in ("os.mkdir", "os.rmdir"):
        return f"{event[3:]} {_below(arguments[0], save)}" if _below(arguments[0], save) else None
    # While a folder is emptied, names are relative to it.
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
    """Ends this process at once, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # Not reached; but if the signal could come late, nothing may happen until then.


def cut_off(num_bytes: int) -> None:
    """The first write beyond ``num_bytes`` into any file is cut off there, and this process ends."""
    signal.signal(signal.SIGXFSZ, lambda *_: die())
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
