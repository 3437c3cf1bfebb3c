"""What every lesson begins and ends with: its ranks are started, joined, and left.

A lesson is a function of its `Place`: which rank it is, among how many, and on which device. It runs on every rank::

    def lesson(place: Place) -> None:
        ...

    if __name__ == "__main__":
        on_ranks(lesson)

Started by ``torchrun`` the ranks are there. Started plainly, ``python tutorials/NAME.py``, the script starts the same
``torchrun`` on itself, with 2 ranks. The device is a GPU for each rank if there are enough of them, then NCCL carries
the messages; if not it is the CPU, and gloo does. The lessons say only ``place.device``.

`gpt/ranks.py` is the longer version of this page and says why each step is there.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gpt  # noqa: F401  (first, since it silences a warning that torch's import gives without NumPy)
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
    """Runs ``lesson`` on every rank, and ends the process with status 1 if it fails on any.

    Args:
        lesson: the lesson; what it asserts must hold on each rank.
        num_ranks: how many ranks to start if nobody has started them.
        at_least: how many the lesson needs; with fewer there would be nothing to see.
        device: ``"auto"``, or ``"cpu"`` to leave the GPUs alone.

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
    """Prints ``text`` once, and not once for each rank. It communicates nothing, so any rank may call it alone."""
    if place.speaks:
        print(text, flush=True)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for the length of a ``with`` block, the same on all ranks of this machine. Every rank must enter it."""
    folder = Path(on_first_rank(tempfile.mkdtemp))
    yield folder
    dist.barrier()  # Nobody may still be reading. After an error the others would not come, and the folder stays.
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def mean_over_ranks(value: Tensor | float) -> float:
    """The mean of one number over all ranks, on every rank. Every rank must call it: it is a collective."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.as_tensor(value).detach().to(device, torch.float64).clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Block(nn.Module):
    """The unit of most lessons: a layer that widens, bends and narrows, added to what came in.

    Args:
        width: numbers in a row, of the input and of the output; inside there are four times as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From rows of ``width`` numbers to rows of as many."""
        return x + self.narrow(torch.tanh(self.widen(x)))


class Net(nn.Module):
    """A few blocks, and a last layer that stays with the root.

    Args:
        width: numbers in a row, of the input and of the output.
        num_blocks: of that width.
    """

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(num_blocks)])
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From rows of ``width`` numbers to rows of as many."""
        return self.last(self.blocks(x))
