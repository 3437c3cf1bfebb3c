"""The training text: the source code of Python's standard library, which is already installed.

The text has about 12 MB in 700 files. It differs a little between Python releases, so each run prints its SHA-256. Two
runs with the same hash and seed read the same bytes in the same order.

Every tenth file is held out for evaluation. The split is by file, so that no test window overlaps with a training
window.

**Windows.** In data parallel training, the ranks must train on *different* windows; otherwise N ranks repeat the work
of one. For a comparison, a single process must train on the *same* windows as N ranks together. Both are possible,
because a batch is a pure function of ``(seed, rank, step)``. Rank ``r`` computes its own batch. A single process
computes the batches of all ranks and concatenates them. Worked example, two ranks, step 7, two windows for each::

    rank 0      batch_of(text, seed=0, rank=0, step=7, ...)      its seed is (0 * 100_003 + 7) * 1024 + 0 = 7168
    rank 1      batch_of(text, seed=0, rank=1, step=7, ...)                                               7169
    single      both batches, concatenated along dim 0: the global batch, of 4 windows
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "batch_of", "global_batch", "read_standard_library", "seed_of"]

# Tests contain long tables of literals. `site-packages` is not part of the standard library.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HOLD_OUT_EVERY = 10
MAX_RANKS = 1024


@dataclass(frozen=True)
class Corpus:
    """The text as two 1-D tensors of bytes.

    Attributes:
        train: ``uint8``, the training files, concatenated.
        held_out: ``uint8``, the files that are only used for evaluation.
        num_files: number of files in both.
        sha256: hash of all files in sorted order, in hexadecimal.
    """

    train: Tensor
    held_out: Tensor
    num_files: int
    sha256: str

    @property
    def num_bytes(self) -> int:
        """Number of bytes in both parts."""
        return self.train.numel() + self.held_out.numel()


def read_standard_library(root: Path | None = None) -> Corpus:
    """Reads every ``.py`` file under ``root`` (default: this Python's standard library) in the order of its path.

    Raises:
        ValueError: there are fewer than two files, so there is nothing to train on or nothing to hold out.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    # `_sysconfigdata*` is generated for one machine, so with it the hash would differ between machines.
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
            f"{root} contains {len(files)} Python source files; at least 2 are needed, for training and evaluation"
        )
    kept = b"".join(file for index, file in enumerate(files) if index % HOLD_OUT_EVERY)
    held_out = b"".join(files[::HOLD_OUT_EVERY])
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    return Corpus(_tensor(kept), _tensor(held_out), len(files), digest)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def seed_of(seed: int, rank: int, step: int) -> int:
    """A seed for each pair of rank and step of a run; different pairs have different seeds.

    This is not a hash: ``MAX_RANKS`` is the base of a number system, so two pairs cannot collide. The remainder keeps
    the seed within 32 bits, because torch's CPU generator ignores all higher bits (measured:
    ``test_seeds_fit_into_the_bits_that_the_generator_uses``).

    Raises:
        ValueError: the rank is too large for the number system.
    """
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank} is outside 0 to {MAX_RANKS - 1}, the range in which seeds differ")
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
    """The batches of all ranks in a step, concatenated along dim 0 in rank order."""
    parts = [
        batch_of(text, seed=seed, rank=rank, step=step, num_windows=num_windows, context=context)
        for rank in range(num_ranks)
    ]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])
