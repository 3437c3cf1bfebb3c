"""The pool of ranks: processes that live through the test session.

Starting a process and importing torch takes seconds; a test takes milliseconds. So for each world size that some test
asks for there is one pool, started when first needed, and tests are sent to it by name.

What can go wrong, and what happens then:

* a rank raises: its traceback comes back and the test fails with it. The other ranks may be waiting for it in a
  collective; they get a grace period, then the pool is thrown away, and the next test starts a new one;
* ranks hang: after the limit each is asked (by a signal) to write down what every thread is doing, and the test fails
  with the stacks of all ranks side by side;
* the session dies: a rank that finds its pipe closed ends itself.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import io
import multiprocessing as mp
import multiprocessing.connection
import os
import pathlib
import random
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Failure", "close_all", "run", "use_device"]

GRACE = 3.0

_device_kind = "cpu"
_pools: dict[int, RankPool] = {}


class Failure(AssertionError):
    """A test's body failed on some rank; the message holds that rank's traceback."""


def use_device(kind: str) -> None:
    """Which device the ranks compute on, ``"cpu"`` or ``"cuda"``; for the session."""
    global _device_kind
    _device_kind = kind


def run(num_ranks: int, module: str, name: str, arguments: dict[str, Any], limit: float) -> None:
    """Runs one test's body on the pool of ``num_ranks``.

    Raises:
        Failure: some rank raised, died or hung.
    """
    __tracebackhide__ = True
    if num_ranks not in _pools:
        _pools[num_ranks] = RankPool(num_ranks, _device_kind)
    pool = _pools[num_ranks]
    try:
        pool.run(module, name, arguments, limit)
    except BaseException:
        # Nobody knows what the other ranks are waiting for.
        _pools.pop(num_ranks).close()
        raise


def close_all() -> None:
    """Ends all pools."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_all)


@dataclass
class RankPool:
    """``num_ranks`` processes with a default process group."""

    num_ranks: int
    kind: str
    folder: pathlib.Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-"))
        # A fork server has imported torch once; each rank is a cheap copy of it that has not run anything yet.
        context = mp.get_context("forkserver" if self.kind == "cpu" else "spawn")
        if self.kind == "cpu":
            context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "spec_tests.harness.pool"])
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.processes = []
        for rank in range(self.num_ranks):
            mine, its = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self.num_ranks, self.kind, str(self.folder), its), daemon=True
            )
            process.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, module: str, name: str, arguments: dict[str, Any], limit: float) -> None:
        """Sends the test to every rank and waits for all answers."""
        __tracebackhide__ = True
        for pipe in self.pipes:
            pipe.send((module, name, arguments))
        waiting = dict(enumerate(self.pipes))
        failures: list[str] = []
        deadline = time.monotonic() + limit
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                answer = self._answer(rank, waiting.pop(rank))
                if answer is not None:
                    failures.append(answer)
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            raise Failure("\n".join(failures))
        if waiting:
            raise Failure(f"hang: no answer from ranks {sorted(waiting)} after {limit} s\n{self._stacks()}")

    def _answer(self, rank: int, pipe: multiprocessing.connection.Connection) -> str | None:
        try:
            answer: str | None = pipe.recv()
        except (EOFError, ConnectionError):
            self.processes[rank].join(1)
            return f"rank {rank} died, exit code {self.processes[rank].exitcode}"
        return answer

    def _stacks(self) -> str:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        written = [(rank, (self.folder / f"stacks-{rank}").read_text()) for rank in range(self.num_ranks)]
        return "\n".join(f"--- stacks of rank {rank} ---\n{text}" for rank, text in written)

    def close(self) -> None:
        """Ends the processes, if need be by force."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()


# ---- on a rank ------------------------------------------------------------------------------------------------------

_device_here = torch.device("cpu")


def device_of_this_rank() -> torch.device:
    """The device that this process computes on."""
    return _device_here


def _work(rank: int, num_ranks: int, kind: str, folder: str, pipe: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(f"{folder}/stacks-{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        _start(rank, num_ranks, kind, folder)
        # A closed pipe means that the session is over or has given this pool up.
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                module, name, arguments = pipe.recv()
                pipe.send(_run_body(rank, module, name, arguments))
    os._exit(0)


def _start(rank: int, num_ranks: int, kind: str, folder: str) -> None:
    global _device_here
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks)
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if kind == "cuda":
        index = rank % torch.cuda.device_count()
        if torch.cuda.device_count() < num_ranks:
            # Several ranks on one GPU: NCCL allows it if it takes them for different hosts.
            os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")
        _device_here = torch.device("cuda", index)
        torch.cuda.set_device(_device_here)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=55),
    )


def _run_body(rank: int, module: str, name: str, arguments: dict[str, Any]) -> str | None:
    """Runs one body; ``None`` if it went well, else what to show."""
    output = io.StringIO()
    environment = dict(os.environ)
    torch.manual_seed(0)
    random.seed(0)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            _find(module, name)(**arguments)
    except BaseException:
        text = f"--- rank {rank} ---\n{traceback.format_exc()}"
        return text + (f"--- output of rank {rank} ---\n{output.getvalue()}" if output.getvalue() else "")
    finally:
        _tidy(environment)
    return None


def _find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found.body_on_a_rank


def _tidy(environment: dict[str, str]) -> None:
    """What one test leaves behind must not meet the next."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)
