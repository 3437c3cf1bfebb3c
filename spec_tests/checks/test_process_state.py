"""The state of a process while its process group lives, in a child that it forks, and afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from minifsdp.checks.collective_log import log
from minifsdp.engine import collectives
from minifsdp.engine.mesh import Group
from spec_tests.harness import pool
from spec_tests.harness.process_state import changes, state_of_process
from spec_tests.ports import free_port

pytestmark = [pytest.mark.cpu, pytest.mark.pure]

# `state_of_process` lists threads, signal handlers, the wake-up descriptor, exit handlers, the environment, files in
# the current and the temporary folder, hooks of Python and of torch, and functions and classes of torch.
HOOKS = ["exit handlers", "torch.optim.optimizer._global_optimizer_pre_hooks"]
# For each moment, what has changed, the number of further threads of the operating system, and of further descriptors.
# The thread waits for questions of other ranks, on a connection of its own to the store.
WITHOUT_THE_PACKAGE: tuple[list[str], int, int] = ([], 0, 0)
WHILE_THE_GROUP_LIVES = (HOOKS, 1, 1)
AFTER_ERRORS = (HOOKS, 1, 1)
AFTER_THE_GROUP = ([], 0, 0)


def numbers() -> tuple[int, int]:
    """The number of threads of the operating system, and of open descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def join(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.barrier()


def shard(api: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
    if api == "fully_shard":
        minifsdp.fully_shard(model[0])
        return minifsdp.fully_shard(model)
    return minifsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    dist.barrier()


def look(rank: int, api: str, ports: tuple[int, int], folder: Path, seen: Any) -> None:
    """Runs on each rank. Puts what has changed at each moment into the queue ``seen``."""
    torch.set_num_threads(1)
    os.chdir(folder)
    tempfile.tempdir = str(folder)
    # torch keeps some modules, threads and exit handlers after its first group and its first backward.
    join(rank, ports[0])
    step(nn.Linear(4, 4))
    nn.Sequential(nn.Linear(4, 4)).state_dict()
    dist.destroy_process_group()
    join(rank, ports[1])
    before, with_group = state_of_process(), numbers()
    found = []

    def note() -> None:
        different = [change.partition(":")[0] for change in changes(before, state_of_process())]
        threads, descriptors = (now - then for now, then in zip(numbers(), with_group, strict=True))
        # Rank 0 hosts the store, and has the other end of each connection.
        is_host = rank == 0 and descriptors > 0
        found.append((different, max(0, threads), max(0, descriptors - 2 * is_host)))
        if dist.is_initialized():
            dist.barrier()

    note()
    model = shard(api)
    step(model)
    note()
    if rank == 0:
        child = os.fork()
        if child == 0:
            # The child is not a rank, so no other rank answers it.
            os._exit(0 if log.diagnosis((None, 0, 0)).strip() == "" else 1)  # type: ignore[arg-type]
        assert os.waitpid(child, 0)[1] == 0
    step(model)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="different collectives"):
            all_gather_of(3 + rank)
    note()
    del model
    dist.destroy_process_group()
    note()
    seen.put(found)


def all_gather_of(number: int) -> None:
    group = Group.of(dist.group.WORLD)  # type: ignore[arg-type]
    collectives.all_gather(group, torch.zeros(2 * number), torch.ones(number)).wait()


def results_of_ranks(start: str, body: Callable[..., None], *arguments: Any) -> list[Any]:
    """The objects that two new processes put into the queue ``seen``, the last argument of ``body``."""
    context: Any = pool.fork_server() if start == "forked" else multiprocessing.get_context("spawn")
    seen = context.Queue()
    ranks = [context.Process(target=body, args=(rank, *arguments, seen)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        return [seen.get(timeout=100) for _ in ranks]
    finally:
        for process in ranks:
            process.join(20)
            process.kill()


@pytest.mark.spec("LEDGER-19", "HEALTHY-06", "HEALTHY-09", "LEDGER-07")
@pytest.mark.parametrize("start", ["forked", "spawned"])
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
def test_what_a_process_sees_of_the_package(api: str, start: str, tmp_path: Path) -> None:
    found = results_of_ranks(start, look, api, (free_port(), free_port()), tmp_path)
    assert found == [[WITHOUT_THE_PACKAGE, WHILE_THE_GROUP_LIVES, AFTER_ERRORS, AFTER_THE_GROUP]] * 2


@pytest.mark.spec("LEDGER-19")
def test_threads_of_the_program_can_be_joined_while_a_group_lives() -> None:
    """Programs and test harnesses join all threads that `threading` lists."""
    assert results_of_ranks("forked", join_all_threads, free_port()) == [["MainThread"]] * 2


def join_all_threads(rank: int, port: int, seen: Any) -> None:
    join(rank, port)
    handler = signal.getsignal(signal.SIGTERM)
    step(shard("fully_shard"))
    assert signal.getsignal(signal.SIGTERM) is handler
    seen.put([thread.name for thread in threading.enumerate() if thread.name != "QueueFeederThread"])
    dist.destroy_process_group()
