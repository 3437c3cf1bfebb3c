"""Starting the ranks, finding each one's device, and cleaning up behind them.

A *rank* is a process, and every rank runs the whole script. Which one it is it learns from its environment, where
``torchrun`` puts ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``. A script that was started plainly finds none of them;
it then becomes the starter itself and runs the same ``torchrun``, from inside, on its own file::

    python train_gpt.py
      torchrun --standalone --nproc-per-node 2 train_gpt.py
        rank 0: train_gpt.py
        rank 1: train_gpt.py

On several machines ``RANK`` counts over all of them and ``LOCAL_RANK`` over one. A GPU is chosen by the *local* rank:
rank 9 of two machines with 8 GPUs each wants the second GPU of the second machine, there is no tenth.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Imported now and not by the first step of an optimizer, when there is a process group: default arguments of its
# functions hold the default group of the moment of its import for ever, and with the group its threads.
importlib.import_module("torch.distributed.nn.functional")

__all__ = [
    "Place",
    "from_all_ranks",
    "joined_ranks",
    "mesh_of",
    "on_first_rank",
    "require_equal",
    "start_ranks",
    "started_by_torchrun",
    "together",
]


Value = TypeVar("Value")


@dataclass(frozen=True)
class Place:
    """Where this process stands.

    Attributes:
        rank: its number among all ranks.
        num_ranks: how many there are.
        device: where it computes.
        backend: who carries its messages, ``"gloo"`` or ``"nccl"``.
        remark: something the reader should know about the choice of the device; ``""`` for nothing.
    """

    rank: int
    num_ranks: int
    device: torch.device
    backend: str
    remark: str = ""

    @property
    def speaks(self) -> bool:
        """Whether this rank prints. One of them must, and two would say everything twice."""
        return self.rank == 0


def started_by_torchrun() -> bool:
    """Whether a launcher has given this process a rank."""
    return "RANK" in os.environ


def start_ranks(script: str, num_ranks: int, arguments: list[str]) -> int:
    """Runs ``script`` with ``arguments`` on ``num_ranks`` ranks of this machine and waits for them.

    Returns:
        The exit status: 0, or 1 if any rank failed. A failed rank has printed its own traceback by then.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # Two ranks with as many threads as there are cores each would spend their time on taking turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torchrun(["--standalone", "--nproc-per-node", str(num_ranks), script, *arguments])
    except ChildFailedError as error:
        failed = ", ".join(str(rank) for rank in sorted(error.failures))
        print(f"rank {failed} failed; what it had to say is above", file=sys.stderr)
        return 1
    return 0


def choose_device(wish: str, local_rank: int, local_ranks: int) -> tuple[torch.device, str]:
    """The device of a rank, and a remark if it is not the one that the reader may have expected."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "cpu" or (wish == "auto" and num_gpus == 0):
        return torch.device("cpu"), ""
    if num_gpus >= local_ranks:
        return torch.device("cuda", local_rank), ""
    shortage = f"{local_ranks} ranks need {local_ranks} GPUs and this machine shows {num_gpus}"
    if wish == "auto":
        return torch.device("cpu"), f"{shortage}; so this run is on the CPU"
    raise SystemExit(f"--device cuda: {shortage}. Start fewer ranks, or use --device cpu.")


@contextmanager
def joined_ranks(device: str) -> Iterator[Place]:
    """Joins the other ranks for the length of a ``with`` block, and leaves them properly whatever happens inside.

    Every rank must enter it.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``: CUDA if there is a GPU for each rank of this machine.

    Raises:
        SystemExit: ``"cuda"`` was asked for and there are not enough GPUs.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    chosen, remark = choose_device(device, local_rank, local_ranks)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    # If torchrun has started the job again, the addresses of its life before are still there, and gloo would try them.
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"life-{life}", next(dist.rendezvous("env://"))[0])
    device_id = chosen if chosen.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, device_id=device_id)
    try:
        yield Place(rank, num_ranks, chosen, backend, remark)
        # Whoever leaves first closes connections on which the others may still be waiting.
        dist.barrier()
    finally:
        dist.destroy_process_group()
        # Gloo's threads let go of their last tensors a moment after the collective. A thread that still has to while
        # Python shuts down aborts the process, rarely and without a traceback.
        time.sleep(0.05)


def mesh_of(place: Place, *, hybrid: bool) -> DeviceMesh:
    """Who shards with whom: a row of all ranks; for a hybrid, pairs that shard, and copies of the pairs.

    Four ranks and a hybrid: the pairs are 0 1 and 2 3; rank 0 has its copy on rank 2, rank 1 on rank 3. On real
    machines the place of the pair is taken by the GPUs of one machine, since they talk to each other much faster than
    to anybody else. Every rank must call it, and for a hybrid the number of ranks must be even.
    """
    if not hybrid:
        return init_device_mesh(place.device.type, (place.num_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(place.device.type, (place.num_ranks // 2, 2), mesh_dim_names=("replicate", "shard"))


def from_all_ranks(mine: Value) -> list[Value]:
    """What each rank has, in order of rank, on every rank. Every rank must call it; any value that pickles will do.

    ``torch.distributed.all_gather_object`` does the same but needs NumPy. The values may differ in length, and an
    all-gather wants equal pieces: so the lengths travel first, and then everybody sends as much as the longest.
    """
    message = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    lengths = [int(length) for length in _all_gather(torch.tensor([message.numel()]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: message.numel()] = message
    pieces = _all_gather(padded)
    return [pickle.loads(bytes(piece[:length].tolist())) for piece, length in zip(pieces, lengths, strict=True)]


def _all_gather(piece: Tensor) -> list[Tensor]:
    # NCCL carries nothing that lies on the CPU.
    piece = piece.cuda() if dist.get_backend() == "nccl" else piece
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, piece)
    return [received.cpu() for received in pieces]


def require_equal(what: str, mine: str) -> None:
    """Stops all ranks if they do not agree on something they must agree on. Every rank must call it.

    Args:
        what: for the message.
        mine: this rank's value, or the hash of it.

    Raises:
        RuntimeError: on every rank, so that none is left waiting; it names a rank that differs from rank 0.
    """
    values = from_all_ranks(mine)
    for rank, value in enumerate(values):
        if value != values[0]:
            raise RuntimeError(
                f"{what} differs: rank 0 has {values[0]}, rank {rank} has {value}. "
                "All machines must run the same release of Python."
            )


def together(action: Callable[[], Value]) -> Value:
    """Does something on every rank, each for itself. If it fails on one rank, it fails on all.

    A rank that simply raised would leave the others waiting in their next collective. So they agree first. Every rank
    must call it, and ``action`` itself must not communicate.

    Raises:
        RuntimeError: on every rank, with what each failed rank had to say.
    """
    failure: Exception | None = None
    result: list[Value] = []
    try:
        result.append(action())
    except Exception as error:
        failure = error
    complaints = from_all_ranks(f"{type(failure).__name__}: {failure}" if failure else None)
    failures = [f"rank {rank}: {complaint}" for rank, complaint in enumerate(complaints) if complaint]
    if failures:
        raise RuntimeError("; ".join(failures)) from failure
    return result[0]


def on_first_rank(action: Callable[[], Value]) -> Value:
    """As `together`, but only rank 0 acts; the others wait for it, and every rank gets its result."""
    mine = together(action if dist.get_rank() == 0 else lambda: None)
    return from_all_ranks(mine)[0]  # type: ignore[return-value]
