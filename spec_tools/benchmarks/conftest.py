"""The ranks of a benchmark: rank 0 is this process, and the others are started for each benchmark."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

QUICK = 4
LIMIT = 300.0  # seconds

Action = Callable[[], Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"{QUICK} timed actions for each benchmark")


def join(rank: int, num_ranks: int, folder: Path) -> None:
    """Makes this process a rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def follow(
    index: int, num_ranks: int, folder: Path, rounds: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Runs one of the other ranks."""

    def repeat(action: Action) -> None:
        for _ in range(rounds):
            dist.barrier()
            action()

    join(index + 1, num_ranks, folder)
    work(repeat, *arguments)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def on_ranks(benchmark: Any, pytestconfig: pytest.Config, tmp_path: Path) -> Callable[..., Any]:
    """Runs ``work(timer, *arguments)`` on all ranks; returns the result of rank 0.

    ``work`` must be a function of a module. It calls ``timer(action)`` once.
    """

    def run(num_ranks: int, rounds: int, work: Callable[..., Any], *arguments: Any) -> Any:
        rounds = min(rounds, QUICK) if pytestconfig.getoption("--quick") else rounds

        def measure(action: Action) -> None:
            before = time.process_time()
            benchmark.pedantic(action, setup=dist.barrier, rounds=rounds)
            benchmark.extra_info["cpu"] = (time.process_time() - before) / rounds

        following = (num_ranks, tmp_path, rounds, work, arguments)
        others = mp.start_processes(follow, following, nprocs=num_ranks - 1, join=False)
        try:
            join(0, num_ranks, tmp_path)
            result = work(measure, *arguments)
            dist.barrier()
            dist.destroy_process_group()
            others.join(LIMIT)
        finally:
            for process in others.processes:
                process.kill()
        return result

    return run
