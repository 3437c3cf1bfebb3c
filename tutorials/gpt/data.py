"""The training text: the Python standard library, which every reader of this file has already installed.

About 12 MB of source in 700 files. It differs a little from one Python release to the next, so its SHA-256 is printed
with each run: two runs with one hash and one seed saw the same bytes in the same order.

Every tenth file is held out, whole files and not pieces of them, so that no window of the test ever shared a line
with a window of the training.

**Who reads what.** In data parallel training the ranks must see *different* windows, or N ranks do the work of one. And
for a comparison, one process alone must be able to see the *same* windows as N ranks together. Both follow when a
batch is a pure function of ``(seed, rank, step)`` and of nothing else: rank ``r`` asks for its own, and a single
process asks for those of all ranks and concatenates them. Worked example, two ranks, step 7, two windows for each::

    rank 0      batch_of(text, seed=0, rank=0, step=7, ...)      its seed is (0 * 100_003 + 7) * 1024 + 0 = 7168
    rank 1      batch_of(text, seed=0, rank=1, step=7, ...)                                               7169
    single      both of these, one above the other: the global batch, of 4 windows
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "batch_of", "global_batch", "read_standard_library", "seed_of"]

# Tests hold long tables of odd literals; `site-packages` is not the standard library but whatever somebody installed.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HOLD_OUT_EVERY = 10
MAX_RANKS = 1024


@dataclass(frozen=True)
class Corpus:
    """The text as two 1-D tensors of bytes.

    Attributes:
        train: ``uint8``, the files to learn from, one after the other.
        held_out: ``uint8``, the files that are only ever used to measure.
        num_files: files in both together.
        sha256: of all files in sorted order, in hexadecimal.
    """

    train: Tensor
    held_out: Tensor
    num_files: int
    sha256: str

    @property
    def num_bytes(self) -> int:
        """Bytes in both parts together."""
        return self.train.numel() + self.held_out.numel()


def read_standard_library(root: Path | None = None) -> Corpus:
    """Reads every ``.py`` file under ``root`` (default: this Python's standard library) in the order of its path.

    Raises:
        ValueError: fewer than two files: nothing would be left to train on, or nothing to hold out.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    # `_sysconfigdata*` is generated for one machine; with it the hash would tell machines apart and not releases.
    paths = [
        path
        for path in root.rglob("*.py")
        if not SKIPPED & set(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    ]
    # Sorted by the path inside the library, with "/": the order of a directory differs between file systems.
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    files = [path.read_bytes() for path in paths]
    if len(files) < 2:
        raise ValueError(
            f"{root} holds {len(files)} Python source files; at least 2 are needed, to train and to hold out"
        )
    kept = b"".join(file for index, file in enumerate(files) if index % HOLD_OUT_EVERY)
    held_out = b"".join(files[::HOLD_OUT_EVERY])
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    return Corpus(_tensor(kept), _tensor(held_out), len(files), digest)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def seed_of(seed: int, rank: int, step: int) -> int:
    """One number for the three, different for each pair of rank and step of a run.

    No hash: with ``MAX_RANKS`` as the base of a number system, two pairs cannot collide. The remainder keeps it
    within 32 bits, since torch's CPU generator ignores all bits above (Measured:
    ``test_seeds_stay_within_what_the_generator_reads``).

    Raises:
        ValueError: the rank does not fit into the number system.
    """
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank} is outside 0 to {MAX_RANKS - 1}, for which seeds are known to differ")
    return ((seed * 100_003 + step) * MAX_RANKS + rank) % 2**32


def batch_of(text: Tensor, *, seed: int, rank: int, step: int, num_windows: int, context: int) -> tuple[Tensor, Tensor]:
    """The windows of one rank in one step.

    Returns:
        Inputs and targets, both ``(num_windows, context)`` of ``int64``; a target is the byte after its input.

    Raises:
        ValueError: the text is shorter than a single window.
    """
    if text.numel() <= context:
        raise ValueError(f"the text has {text.numel()} bytes, too few for a window of {context} and the byte after it")
    generator = torch.Generator().manual_seed(seed_of(seed, rank, step))
    starts = torch.randint(text.numel() - context, (num_windows, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def global_batch(
    text: Tensor, *, seed: int, num_ranks: int, step: int, num_windows: int, context: int
) -> tuple[Tensor, Tensor]:
    """What all ranks together see in a step: their batches one above the other, in order of rank."""
    parts = [
        batch_of(text, seed=seed, rank=rank, step=step, num_windows=num_windows, context=context)
        for rank in range(num_ranks)
    ]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])
