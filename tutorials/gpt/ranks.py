"""Starts the ranks, chooses the device of each rank, and cleans up.

A *rank* is a process, and every rank runs the whole script. ``torchrun`` sets ``RANK``, ``LOCAL_RANK`` and
``WORLD_SIZE`` in the environment of each process. If a script is started without ``torchrun``, these variables are not
set. Then the script runs ``torchrun`` on its own file::

    python train_gpt.py
      torchrun --standalone --nproc-per-node 2 train_gpt.py
        rank 0: train_gpt.py
        rank 1: train_gpt.py

On several machines, ``RANK`` counts the ranks of all machines, and ``LOCAL_RANK`` counts the ranks of one machine. The
*local* rank selects the GPU. For example, with two machines of 8 GPUs each, rank 9 uses the second GPU of the second
machine.
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

# Import this before a process group exists. Default arguments of its functions reference the default group at the time
# of the import, so the group and its threads would stay alive. The first step of an optimizer imports it.
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
    """The rank and device of this process.

    Attributes:
        rank: its number among all ranks.
        num_ranks: the number of ranks.
        device: its device.
        backend: ``"gloo"`` or ``"nccl"``.
        remark: explains the choice of the device; ``""`` for none.
    """

    rank: int
    num_ranks: int
    device: torch.device
    backend: str
    remark: str = ""

    @property
    def speaks(self) -> bool:
        """Whether this rank prints. Only rank 0 does, so nothing is printed twice."""
        return self.rank == 0


def started_by_torchrun() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "RANK" in os.environ


def start_ranks(script: str, num_ranks: int, arguments: list[str]) -> int:
    """Runs ``script`` with ``arguments`` on ``num_ranks`` ranks of this machine and waits for them.

    Returns:
        The exit status: 0, or 1 if a rank failed. The failed rank has already printed its traceback.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # With one thread for each core in each rank, the ranks would compete for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torchrun(["--standalone", "--nproc-per-node", str(num_ranks), script, *arguments])
    except ChildFailedError as error:
        failed = ", ".join(str(rank) for rank in sorted(error.failures))
        print(f"rank {failed} failed; its output is above", file=sys.stderr)
        return 1
    return 0


def choose_device(wish: str, local_rank: int, local_ranks: int) -> tuple[torch.device, str]:
    """The device of a rank, and a remark if it is not the device that the user expects."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "cpu":
        return torch.device("cpu"), ""
    if wish == "auto" and num_gpus == 0:
        return torch.device("cpu"), _why_no_gpu()
    if num_gpus >= local_ranks:
        return torch.device("cuda", local_rank), ""
    shortage = f"{local_ranks} ranks need {local_ranks} GPUs, and this machine has {num_gpus}"
    if wish == "auto":
        return torch.device("cpu"), f"{shortage}. This run uses the CPU"
    raise SystemExit(f"--device cuda: {shortage}. Start fewer ranks, or use --device cpu.")


def _why_no_gpu() -> str:
    """The reason if a build of torch for GPUs finds none, for example a driver that is too old; empty for others."""
    if torch.version.cuda is None:
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch finds no GPU: {str(error).partition(chr(10))[0]}. This run uses the CPU"
    return ""


def store_of_this_start(store: dist.Store, rank: int, num_ranks: int) -> dist.Store:
    """The part of a store that only this start of the job uses. Every rank must call it.

    torchrun keeps the store when it restarts a job, with the addresses of the previous ranks. The number of restarts
    cannot be used as a prefix, because torchrun counts it on each machine: if a machine is notified that another one
    has restarted before its own ranks have failed, it restarts them, and does not count that. So rank 0 chooses the
    prefix. The other ranks ask for it under a number that no other process has.

    Raises:
        RuntimeError: on rank 0, if a rank has not started after some minutes.
    """
    if rank > 0:
        prefix = store.get(f"prefix for {store.add('asked', 1)}").decode()
        store.add(f"{prefix} ranks", 1)
        return dist.PrefixStore(prefix, store)
    prefix, answered = f"start {store.add('starts', 1)}", 0
    until = time.monotonic() + store.timeout.total_seconds()
    while store.add(f"{prefix} ranks", 0) < num_ranks - 1:
        # This also answers processes that have ended, because rank 0 cannot distinguish them.
        while answered < store.add("asked", 0):
            answered += 1
            store.set(f"prefix for {answered}", prefix)
        if time.monotonic() > until:
            raise RuntimeError(f"rank 0: not all of the {num_ranks} ranks have started. See their output")
        time.sleep(0.01)
    return dist.PrefixStore(prefix, store)


@contextmanager
def joined_ranks(device: str) -> Iterator[Place]:
    """Joins the other ranks for a ``with`` block, and destroys the process group at its end.

    Every rank must enter it. After an exception, the group is not destroyed, so that the exit handler of minifsdp can
    still query the other ranks and report where they are.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``: CUDA if there is a GPU for each rank of this machine.

    Raises:
        SystemExit: ``"cuda"`` was requested and there are not enough GPUs.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    chosen, remark = choose_device(device, local_rank, local_ranks)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store = store_of_this_start(next(dist.rendezvous("env://"))[0], rank, num_ranks)
    device_id = chosen if chosen.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, device_id=device_id)
    yield Place(rank, num_ranks, chosen, backend, remark)
    # Without a barrier, a rank could close connections while other ranks still use them.
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads release their last tensors shortly after the collective. In rare cases, a thread does this while
    # Python shuts down, and aborts the process without a traceback.
    time.sleep(0.05)


def mesh_of(place: Place, *, hybrid: bool) -> DeviceMesh:
    """The device mesh: one dimension with all ranks, or for hybrid sharding two dimensions (replicate, shard).

    For hybrid sharding, pairs of ranks shard. With four ranks, the pairs are 0 1 and 2 3. Rank 2 stores the same shard
    as rank 0, and rank 3 the same shard as rank 1. On real machines, shard over all GPUs of a machine instead of pairs,
    because the links within a machine are much faster than those between machines. Every rank must call this function.
    For hybrid sharding, the number of ranks must be even.
    """
    if not hybrid:
        return init_device_mesh(place.device.type, (place.num_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(place.device.type, (place.num_ranks // 2, 2), mesh_dim_names=("replicate", "shard"))


def from_all_ranks(mine: Value) -> list[Value]:
    """The values of all ranks in rank order, on every rank. Every rank must call it with a value that can be pickled.

    ``torch.distributed.all_gather_object`` does the same but needs NumPy. The values may differ in length, but an
    all-gather needs equal sizes. So the ranks exchange the lengths first, and pad all values to the greatest length.
    """
    message = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    lengths = [int(length) for length in _all_gather(torch.tensor([message.numel()]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: message.numel()] = message
    local_shards = _all_gather(padded)
    return [
        pickle.loads(bytes(local_shard[:length].tolist()))
        for local_shard, length in zip(local_shards, lengths, strict=True)
    ]


def _all_gather(local_shard: Tensor) -> list[Tensor]:
    # NCCL cannot send CPU tensors.
    local_shard = local_shard.cuda() if dist.get_backend() == "nccl" else local_shard
    local_shards = [torch.empty_like(local_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(local_shards, local_shard)
    return [received.cpu() for received in local_shards]


def require_equal(what: str, mine: str) -> None:
    """Raises an error on all ranks if a value differs between them. Every rank must call it.

    Args:
        what: name of the value, for the message.
        mine: this rank's value, or its hash.

    Raises:
        RuntimeError: on every rank, so that no rank hangs; the message names a rank that differs from rank 0.
    """
    values = from_all_ranks(mine)
    for rank, value in enumerate(values):
        if value != values[0]:
            raise RuntimeError(
                f"{what} differs: rank 0 has {values[0]}, rank {rank} has {value}. "
                "All machines must use the same version of Python."
            )


def together(action: Callable[[], Value]) -> Value:
    """Runs an action on every rank. If it fails on one rank, it fails on all.

    If only one rank raised an exception, the other ranks would hang in their next collective. So the ranks exchange
    their errors first. Every rank must call it, and ``action`` itself must not call collectives.

    Raises:
        RuntimeError: on every rank, with the errors of all failed ranks.
    """
    failure: Exception | None = None
    result: list[Value] = []
    try:
        result.append(action())
    except Exception as error:
        failure = error
    problems = from_all_ranks(f"{type(failure).__name__}: {failure}" if failure else None)
    failures = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if failures:
        raise RuntimeError("; ".join(failures)) from failure
    return result[0]


def on_first_rank(action: Callable[[], Value]) -> Value:
    """Like `together`, but only rank 0 runs the action. The other ranks wait, and every rank gets the result."""
    mine = together(action if dist.get_rank() == 0 else lambda: None)
    return from_all_ranks(mine)[0]  # type: ignore[return-value]
