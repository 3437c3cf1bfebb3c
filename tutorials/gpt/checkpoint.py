"""A folder of checkpoints that is always valid, even if a process is killed.

A save takes seconds, and at any time a process may be killed or a machine may lose power. So this module never modifies
a complete checkpoint. It writes the new checkpoint to a separate folder, and a single rename makes it visible. ::

    runs/
      step-000040/           complete: the ranks' files, and manifest.json with the size and SHA-256 of each
      .step-000060.part/     being written, or left behind by a run that was killed
      newest                 one line of text: step-000040

A save, in this order:

1. remove incomplete folders of killed runs, and create an empty folder for the new checkpoint. It has the same parent
   folder, because a rename cannot cross file systems;
2. all ranks write their files into it;
3. flush every file to the disk, and compute its size and SHA-256. A rename can reach the disk before the contents do.
   Then, after a power loss, the new name would refer to old data;
4. write the manifest as the last file, and flush the folder, because its list of names must be on the disk as well;
5. rename the folder to its final name, and flush its parent folder;
6. update `newest`, again with a temporary file and a rename;
7. remove old checkpoints. Removing a folder takes many steps, so a rename hides the folder first.

Worked example, a save of step 60 and a kill:

=====================  ===================================  ==================================================
killed during          state of the folder                  what the next run does
=====================  ===================================  ==================================================
1 to 5                 `step-000040`, some `.part`          resumes from 40; removes the rest
between 5 and 6        also `step-000060`, not in `newest`  resumes from 40, and replaces 60 by the same
between 6 and 7        40 and 60, and `newest` is 60        resumes from 60
7                      60, 40, and half of 20, hidden       resumes from 60; removes the rest
=====================  ===================================  ==================================================

A complete checkpoint can still be damaged later, by a copy that stopped in the middle or by a failing disk. So loading
verifies it: every rank compares the sizes of all files, hashes some of the files, and exchanges its results with the
other ranks. If the newest checkpoint is damaged, the ranks use the previous one. If none is intact, all ranks raise an
error.

While a job saves or removes checkpoints, it locks the folder. Without the lock, two jobs in one folder would remove
each other's `.part` folders. With the lock, the second job ends with an error.

Cost: saving and loading read every file again to compute its SHA-256. This takes about a second per gigabyte, and the
ranks share the work. All ranks must have access to the same folder.

This module does not depend on models. `resume` defines the contents of the files.

*In torch:* ``torch.distributed.checkpoint`` also writes its ``.metadata`` last. But it writes into the final folder and
stores no checksums, and the user must name, select and remove checkpoints.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from .manifest import (
    MANIFEST,
    CheckpointError,
    Flaw,
    check_files,
    gathered,
    names_of_files,
    problem,
    read_manifest,
    seal_of,
    sealed,
    version_flaws,
)
from .ranks import from_all_ranks, on_first_rank, together

__all__ = ["Checkpoint", "CheckpointFolder", "choose"]

POINTER = "newest"
NAME = re.compile(r"step-(\d{6,})")
HIDDEN = re.compile(r"\.(step-\d{6,}\.(part|old)|newest\.part)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files match its manifest.

    Attributes:
        folder: the folder of its files.
        step: the step at which it was saved.
        facts: settings of the run that wrote it.
    """

    folder: Path
    step: int
    facts: dict[str, Any]

    def refuse_if(self, flaws: list[Flaw]) -> None:
        """Raises an error on every rank if any rank has found a flaw. Every rank must call it.

        Raises:
            CheckpointError: a rank has found a flaw. The message contains file, key, expected and found value.
        """
        all_ranks = gathered(flaws)
        if all_ranks:
            raise CheckpointError(problem(self.folder, all_ranks))


class CheckpointFolder:
    """A folder of checkpoints.

    Args:
        root: the folder. The first save creates it. All ranks must have access to the same folder.
        keep: how many complete checkpoints to keep, at least 1.
    """

    def __init__(self, root: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: keep at least the newest checkpoint")
        self.root, self.keep = root, keep

    def save(self, step: int, facts: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """Adds a checkpoint. Every rank must call it.

        Args:
            step: the step of the training; it must be greater than that of earlier checkpoints.
            facts: settings to store in the manifest; any values that JSON supports.
            write: a function that writes this rank's files to the folder that it gets. It may call collectives. If it
                raises an exception on one rank, it must raise on all ranks.

        Returns:
            The folder of the checkpoint.

        Raises:
            RuntimeError: a write failed. Every rank raises it, and complete checkpoints are unchanged.
        """
        final = self.root / f"step-{step:06}"
        part = self.root / f".{final.name}.part"
        on_first_rank(lambda: self.root.mkdir(parents=True, exist_ok=True))
        with self._locked():
            on_first_rank(lambda: self._before_concat(part))  # 1.
            with _limits_named():
                write(part)  # 2.
            dist.barrier()
            names = on_first_rank(lambda: names_of_files(part))
            share = names[dist.get_rank() :: dist.get_world_size()]
            mine = together(lambda: {name: _flushed_and_sealed(part / name) for name in share})  # 3.
            seals = {name: seal for theirs in from_all_ranks(mine) for name, seal in theirs.items()}
            on_first_rank(lambda: self._publish(part, final, {"step": step, "facts": dict(facts), "files": seals}))
        return final

    def tidy(self) -> None:
        """Removes incomplete folders of killed runs. Every rank must call it. Each save also begins with it.

        Raises:
            RuntimeError: another job is writing to the folder, or ``newest`` is a folder. Every rank raises it.
        """
        with self._locked():
            on_first_rank(self._tidy)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Rank 0 locks the folder against other jobs. The lock ends with the process, also after ``kill -9``."""
        held: list[int] = []
        on_first_rank(lambda: held.extend(_lock(self.root)))
        try:
            yield
        finally:
            for number in held:
                # This unlocks the folder even if a child process has a copy of the descriptor.
                fcntl.flock(number, fcntl.LOCK_UN)
                os.close(number)

    def _tidy(self) -> None:
        pointer = self.root / POINTER
        if pointer.is_dir():
            raise IsADirectoryError(f"{pointer} is a folder, but a save writes a file with this name. Move it away.")
        for left in self.root.iterdir() if self.root.is_dir() else []:
            if HIDDEN.fullmatch(left.name):
                _remove(left)

    def _before_concat(self, part: Path) -> None:
        self._tidy()
        part.mkdir()

    def _publish(self, part: Path, final: Path, manifest: dict[str, Any]) -> None:
        _write_durably(part / MANIFEST, sealed(manifest))  # 4.
        # Replace a damaged checkpoint of this step, or one that is not in `newest`, so that the run can save it again.
        replaced = [self._hide(final)] if os.path.lexists(final) else []
        os.rename(part, final)  # 5.
        _flush(self.root)
        _write_durably(self.root / POINTER, final.name.encode())  # 6.
        # A checkpoint with a greater number is never older.
        older = [name for name in self._names() if _step_of(name) <= _step_of(final.name)][self.keep :]
        for hidden in replaced + [self._hide(self.root / name) for name in older]:  # 7.
            _remove(hidden)

    def _hide(self, folder: Path) -> Path:
        hidden = folder.with_name(f".{folder.name}.old")
        os.rename(folder, hidden)
        _flush(self.root)
        return hidden

    def _names(self) -> list[str]:
        """The names of all checkpoints, the greatest number first."""
        if not self.root.is_dir():
            return []
        names = [path.name for path in self.root.iterdir() if path.is_dir() and NAME.fullmatch(path.name)]
        return sorted(names, key=_step_of, reverse=True)

    def candidates(self) -> list[str]:
        """Names of the checkpoints to try, in order of preference: the one in `newest`, then those before it.

        Checkpoints after `newest` are not candidates: their save was not complete, or a later run resumed from an
        earlier step. If `newest` itself is missing or unreadable, all checkpoints are candidates.
        """
        names = self._names()
        try:
            pointed = (self.root / POINTER).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return names
        if not NAME.fullmatch(pointed):
            return names
        # It stays in the list if its folder is missing, so that the message explains why an older one is used.
        return [pointed] + [name for name in names if _step_of(name) < _step_of(pointed)]

    def newest(self, say: Callable[[str], None]) -> Checkpoint:
        """The newest intact checkpoint. Every rank must call it.

        Args:
            say: called on every rank with the flaws of each damaged checkpoint.

        Raises:
            CheckpointError: there is none, or a different program wrote the newest intact one.
        """
        problems = []
        for name in on_first_rank(self.candidates):
            checkpoint, flaws = _examine(self.root / name)
            if checkpoint is not None:
                return checkpoint
            problems.append(problem(self.root / name, flaws, remedy=""))
            say(problems[-1])
        if problems:
            remedy = f"No checkpoint in {self.root} is intact: resume from another folder."
            raise CheckpointError(" | ".join(problems) + f". {remedy}")
        there = on_first_rank(lambda: sorted(os.listdir(self.root)) if self.root.is_dir() else ["no such folder"])
        flaw = Flaw(str(self.root), "folder", "a checkpoint, such as step-000100", ", ".join(there[:5]) or "nothing")
        raise CheckpointError(problem(self.root, [flaw]))


def choose(resume: Path | None, save: Path | None, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to resume from; ``None`` to start from the beginning. Every rank must call it.

    Args:
        resume: a single checkpoint, or a folder of checkpoints.
        save: the folder for new checkpoints.
        say: called on every rank with remarks about the choice.

    Raises:
        CheckpointError: there is no intact checkpoint to resume from. Or ``save`` contains checkpoints from which this
            run does not resume, so it would remove newer checkpoints than its own.
    """
    resolved = None if resume is None else resume.resolve()
    if save is not None and (resolved is None or save.resolve() not in (resolved, resolved.parent)):
        there = on_first_rank(CheckpointFolder(save).candidates)
        if there:
            flaw = Flaw(str(save), "folder", "no checkpoints, because this run does not resume", ", ".join(there[:3]))
            raise CheckpointError(problem(save, [flaw], f"Add --resume {save}, or save to another folder."))
    if resume is None:
        return None
    if on_first_rank(lambda: (resume / MANIFEST).exists() or NAME.fullmatch(resume.name) is not None):
        checkpoint, flaws = _examine(resume)
        if checkpoint is None:
            raise CheckpointError(problem(resume, flaws))
        return checkpoint
    # This is the first run of a command that resumes later. If `save` is a different folder, it is a mistake.
    if save is not None and save.resolve() == resolved and not on_first_rank(CheckpointFolder(save).candidates):
        say(f"{resume} contains no checkpoint yet: this run starts from step 0")
        return None
    return CheckpointFolder(resume).newest(say)


def _examine(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint if it is intact, otherwise the flaws that each rank has found. Every rank must call it."""
    manifest, flaws = read_manifest(folder)
    # The flaws can differ between ranks. All ranks must agree before the next collective.
    found = gathered(flaws)
    if found:
        return None, found
    checkpoint = Checkpoint(folder, manifest["step"], manifest["facts"])
    checkpoint.refuse_if(version_flaws(manifest))
    found = gathered(check_files(folder, manifest["files"]))
    return (None, found) if found else (checkpoint, [])


def _lock(root: Path) -> list[int]:
    """The descriptor of the locked folder; empty if the file system has no such locks.

    Raises:
        RuntimeError: another process holds the lock.
    """
    if not root.is_dir():
        return []
    number = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise RuntimeError(
            f"another job writes checkpoints to {root} now. Stop it, or save to another folder."
        ) from None
    except OSError:
        os.close(number)
        return []
    return [number]


@contextmanager
def _limits_named() -> Iterator[None]:
    """Adds this rank's limit on file sizes to the error of a write."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is not a subclass of Exception.
        if limit == resource.RLIM_INFINITY:
            raise
        cause = f"this rank cannot write files larger than {limit} bytes (RLIMIT_FSIZE, see `ulimit -f`)"
        raise RuntimeError(f"rank {dist.get_rank()}: {cause}. The save failed: {error}") from error


def _remove(path: Path) -> None:
    """Removes a file, a folder, or a symbolic link; the target of the link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _flushed_and_sealed(path: Path) -> dict[str, Any]:
    _flush(path)
    return seal_of(path)


def _write_durably(path: Path, contents: bytes) -> None:
    """Replaces the contents of a file atomically: after a power loss, it has either the old or the new contents."""
    beside = path.with_name(f".{path.name}.part")
    with beside.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
