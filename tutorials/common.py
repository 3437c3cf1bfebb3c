"""Helpers of the tutorials: start the ranks, print on one rank, and exchange values.

A *lesson* is the main function of a tutorial. It runs on every rank, and gets a `Place`: the rank, the number of ranks
and the device::

    def lesson(place: Place) -> None:
        ...

    if __name__ == "__main__":
        on_ranks(lesson)

``torchrun`` starts the ranks. If you start a script with ``python tutorials/NAME.py``, it runs ``torchrun`` on itself,
with 2 ranks. If there is a GPU for each rank, the device is a GPU and the backend is NCCL; otherwise they are the CPU
and gloo. The lessons only use ``place.device``.

`gpt/ranks.py` explains each of these steps.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gpt  # noqa: F401  (first, because it silences a warning of torch's import without NumPy)
import torch
import torch.distributed as dist
from gpt.ranks import Place, from_all_ranks, joined_ranks, on_first_rank, start_ranks, started_by_torchrun
from torch import Tensor, nn

__all__ = [
    "Block",
    "Net",
    "Place",
    "from_all_ranks",
    "mean_over_ranks",
    "on_first_rank",
    "on_ranks",
    "say",
    "shared_folder",
]


def on_ranks(lesson: Callable[[Place], None], num_ranks: int = 2, *, at_least: int = 2, device: str = "auto") -> None:
    """Runs ``lesson`` on every rank, and ends the process with status 1 if it fails on any rank.

    Args:
        lesson: the main function; its assertions must hold on each rank.
        num_ranks: how many ranks to start if the script was not started by ``torchrun``.
        at_least: the smallest number of ranks for which the lesson is meaningful.
        device: ``"auto"``, or ``"cpu"`` to use only the CPU.

    Raises:
        SystemExit: there are too few ranks, or one of the started ranks has failed.
    """
    if not started_by_torchrun():
        sys.exit(start_ranks(sys.argv[0], num_ranks, sys.argv[1:]))
    with joined_ranks(device) as place:
        if place.num_ranks < at_least:
            raise SystemExit(f"this lesson needs {at_least} ranks and was started with {place.num_ranks}")
        say(place, f"{place.num_ranks} ranks ({place.device.type}, {place.backend})")
        if place.remark:
            say(place, place.remark)
        lesson(place)


def say(place: Place, text: str = "") -> None:
    """Prints ``text`` on one rank only. It does not communicate, so any rank may call it alone."""
    if place.speaks:
        print(text, flush=True)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder for a ``with`` block, the same on all ranks of this machine. Every rank must enter it."""
    folder = Path(on_first_rank(tempfile.mkdtemp))
    yield folder
    dist.barrier()  # Wait until all ranks have finished reading. After an error, the folder stays.
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def mean_over_ranks(value: Tensor | float) -> float:
    """The mean of one number over all ranks, on every rank. It is a collective: every rank must call it."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.as_tensor(value).detach().to(device, torch.float64).clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Block(nn.Module):
    """The unit of most lessons: two linear layers with a tanh between them, and a residual connection.

    Args:
        width: features of the input and of the output; the hidden layer has four times as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(..., width)`` to ``(..., width)``."""
        return x + self.narrow(torch.tanh(self.widen(x)))


class Net(nn.Module):
    """A few blocks, and a last layer that belongs to the root unit.

    Args:
        width: features of the input and of the output.
        num_blocks: the number of blocks.
    """

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(num_blocks)])
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(..., width)`` to ``(..., width)``."""
        return self.last(self.blocks(x))
