"""Healthy programs that need their own processes: their starts and ends, stores, groups, signals and forks.

    python -m spec_tools.processes.healthy PROGRAM

Each program is called on every rank after the import, and initializes its groups itself. Most train with both APIs. A
rank prints ``right`` when its program has finished. The last exit handler prints how long the main thread has slept
since then. Time in which a busy machine runs other processes does not count. ``spec_tests/healthy`` has the programs
that run in the pool of ranks.

Spec: HEALTHY-06 to HEALTHY-13.
"""

from __future__ import annotations

import asyncio
import atexit
import code
import gc
import io
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset

from spec_tests.ports import free_port
from spec_tests.waiting import comes_true

APIS = ("wrapper", "fully_shard")
SECONDS = 3.0  # longer than the watchdog waits before it queries the other ranks
# `start` of ``ranks.py`` sets the second variable.
PLACE = Path(os.environ.get("HEALTHY_FOLDER") or os.environ.get("MINIFSDP_LEDGER_DIR", "."))
SECOND_RUN = "--- second run ---"  # a line on stderr
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@dataclass(frozen=True)
class Program:
    """The requirements that a program proves, how it is started, and its number of ranks."""

    requirements: tuple[str, ...]
    launchers: tuple[str, ...]
    num_ranks: int


PROGRAMS: dict[str, Program] = {}


def healthy(*requirements: str, launchers: tuple[str, ...] = ("plain",), num_ranks: int = 2) -> Callable[..., Any]:
    """Adds a program to `PROGRAMS`."""

    def decorate(program: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[program.__name__] = Program(requirements, launchers, num_ranks)
        return program

    return decorate


def join(limit: float = 300.0, **options: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit), **options)


def join_at(store: Any, limit: float = 300.0) -> None:
    join(limit, store=store, rank=RANK, world_size=WORLD)


def join_at_file(name: str) -> None:
    join(init_method=f"file://{PLACE}/{name}", rank=RANK, world_size=WORLD)


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def store_of_launcher() -> Any:
    """The store of torchrun's agent, or one that rank 0 hosts."""
    is_host = RANK == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, is_host)


def part_of(store: Any, number: int) -> Any:
    """If a rank destroys its groups early, torch finds its addresses of an earlier run in a store without a prefix."""
    return dist.PrefixStore(f"run {number}", store)


class Trainings:
    """A training with each of ``apis``, and a plain one that it is compared with."""

    def __init__(self, apis: tuple[str, ...] = APIS, **options: Any) -> None:
        # Some programs do something before the first import.
        from spec_tests.healthy.support import Net, Training

        self.each = []
        for api in apis:
            # All ranks begin with the same parameters.
            torch.manual_seed(0)
            self.each.append(Training(api, Net(1), **options))

    def step(self, step: int) -> None:
        for each in self.each:
            each.step(step)

    def check(self) -> None:
        for each in self.each:
            each.check()


def train(seconds: float = 0.0, **options: Any) -> Trainings:
    """Trains three steps; rank 1 is late in the second."""
    trained = Trainings(**options)
    for step in range(3):
        if step == 1 and RANK == 1:
            time.sleep(seconds)
        trained.step(step)
    trained.check()
    return trained


def state_dicts(trained: Trainings) -> list[Any]:
    from spec_tests.healthy.support import state_dict_of

    return [dict(state_dict_of(each.model)) for each in trained.each]


# ---- groups and stores ----


@healthy("HEALTHY-06", launchers=("plain", "torchrun"))
def destroyed_and_made_again() -> None:
    """The default group is destroyed and recreated at the same store; a rank joins late, and is late in a step."""
    store = store_of_launcher()
    for seconds in (0.0, SECONDS, 0.0):
        # A rank that connects to an old address waits for the whole limit.
        join_at(store, 30.0)
        train(seconds)
        leave()
        time.sleep(0.5 * RANK)


@healthy("HEALTHY-06", launchers=("torchrun",))
def destroyed_on_one_rank_first() -> None:
    """Rank 0 destroys its groups while rank 1 continues. It waits only briefly; the store remains available."""
    store = store_of_launcher()
    join_at(part_of(store, 0))
    train()
    dist.barrier()
    time.sleep(SECONDS * RANK)
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < 2.5
    join_at(part_of(store, 1))
    train()
    leave()


def counts() -> tuple[int, int]:
    gc.collect()
    return len(threading.enumerate()), len(os.listdir("/proc/self/fd"))


def num_alive(groups: list[Any]) -> int:
    gc.collect()
    return sum(group() is not None for group in groups)


@healthy("HEALTHY-06")
def ten_groups() -> None:
    """Five default groups with each API, one after the other, leave no thread, descriptor, hook or reference.

    The wrapper leaves no file either. With `fully_shard`, torch leaves the file of its mesh.
    """
    for api in APIS:
        seen, groups = [], []
        for number in range(5):
            join_at_file(f"{api}-{number}")
            groups.append(weakref.ref(dist.group.WORLD))
            train(apis=(api,))
            leave()
            comes_true(lambda: num_alive(groups[-1:]) == 0 and threading.active_count() == 1, 2.0)
            seen.append((*counts(), len(_global_optimizer_pre_hooks)))
        assert len({hooks for *_, hooks in seen}) == 1, seen
        assert seen[-1][0] == 1, (seen, threading.enumerate())
        assert seen[-1][1] <= seen[1][1] + 2, seen
        # torch keeps the last group of some meshes.
        assert num_alive(groups) <= 1, [group() for group in groups]


@healthy("HEALTHY-06", num_ranks=4)
def groups_made_by_the_package() -> None:
    """Three default groups. In each, the package makes groups of two ranks: the nodes, or a mesh to reshard to."""
    from torch import nn

    from minifsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from minifsdp.wrap import always_wrap_policy

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    hybrid: dict[str, Any] = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    for api in APIS:
        for number in range(3):
            join_at_file(f"store-{api}-{number}")
            if api == "wrapper":
                model: Any = FullyShardedDataParallel(nn.Linear(4, 4), auto_wrap_policy=always_wrap_policy, **hybrid)
            else:
                model = fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
            model(torch.ones(1, 4)).sum().backward()
            groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
            assert len(groups) == 3
            del model
            leave()
        # torch keeps the groups of the first mesh.
        assert comes_true(lambda: num_alive(groups) == 0, 2.0)


@healthy("HEALTHY-06", "HEALTHY-07", launchers=("forked",))
def hash_store_and_file_store() -> None:
    """First each process trains alone, with a `HashStore`. Then both train together, with a `FileStore`."""
    join(store=dist.HashStore(), rank=0, world_size=1)
    train()
    dist.destroy_process_group()
    join_at(dist.FileStore(str(PLACE / "together"), WORLD))
    train(SECONDS)
    leave()


# ---- a rank that is late, at any place and with any launcher ----


@healthy("HEALTHY-07", launchers=("forked",))
def late_at_every_place() -> None:
    """Rank 1 is late once before sharding, forward, backward, an optimizer step, an evaluation and a save."""
    from spec_tests.healthy.support import batch

    def late() -> None:
        time.sleep(2.6 * (RANK == 1))

    join()
    late()
    trained = Trainings()
    trained.step(0)
    for each in trained.each:
        late()
        loss = each.loss(1)
        late()
        loss.backward()
        late()
        each.plain_backward(1)
        each.update()
        with torch.no_grad():
            late()
            each.model(batch(RANK, 0))
    late()
    state_dicts(trained)
    trained.step(2)
    trained.check()
    leave()


@healthy("HEALTHY-07", num_ranks=3)
def host_of_the_store_leaves() -> None:
    """Rank 0 hosts the store and leaves; ranks 1 and 2 continue in a group of their own, and save."""
    join_at(store_of_launcher())
    group = dist.new_group([1, 2])
    if RANK > 0:
        trained = Trainings(ranks=(1, 2), group=group)
        trained.step(0)
    dist.barrier()
    if RANK > 0:
        time.sleep(1.5)
        trained.step(1)
        for each, state in zip(trained.each, state_dicts(trained), strict=True):
            torch.testing.assert_close(state, dict(each.plain.state_dict()), rtol=1e-4, atol=1e-5)
        trained.step(2)
        trained.check()


@healthy("HEALTHY-07")
def prefix_store_and_no_temporary_folder() -> None:
    """A prefix store over another one, no writable folder for temporary files, and a rank is late."""
    os.environ["MINIFSDP_LEDGER_DIR"] = "/proc/absent"
    tempfile._candidate_tempdir_list = lambda: ["/proc/absent"]  # type: ignore[attr-defined]
    tempfile.tempdir = None
    join_at(dist.PrefixStore("b", dist.PrefixStore("a", store_of_launcher())))
    train(SECONDS)
    leave()


@healthy("HEALTHY-07", "HEALTHY-11", launchers=("restarts",))
def one_rank_raises_once() -> None:
    """Rank 1 raises after three steps, and torchrun restarts the job. Then a rank is late."""
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if number == 1:
        print(SECOND_RUN, file=sys.stderr, flush=True)
    join_at(part_of(store_of_launcher(), number))
    trained = train(SECONDS * number)
    if (number, RANK) == (0, 1):
        raise ValueError("a bad batch")
    trained.step(3)
    trained.check()
    leave()


@healthy("HEALTHY-07", num_ranks=1)
def spawned() -> None:
    """`torch.multiprocessing.spawn` starts two ranks. Rank 0, which hosts the store, ends first."""
    torch.multiprocessing.spawn(train_in_a_child, (free_port(),), nprocs=2)


def train_in_a_child(rank: int, port: int) -> None:
    global RANK, WORLD
    RANK, WORLD = rank, 2
    join(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    train(SECONDS)
    leave()
    time.sleep(2.0 * rank)


# ---- a slow store ----


class SlowStore(dist.Store):
    """A store in Python. Each access takes 50 ms."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self.num_accesses = store, 0


def slow(name: str) -> Callable[..., Any]:
    def call(self: SlowStore, *arguments: Any) -> Any:
        self.num_accesses += 1
        time.sleep(0.05)
        return getattr(self._store, name)(*arguments)

    return call


for method in ("set", "get", "add", "check", "wait", "compare_set", "delete_key"):
    setattr(SlowStore, method, slow(method))


@healthy("HEALTHY-13")
def slow_store() -> None:
    """The store is a class in Python whose accesses take 50 ms. After the first steps, training does not access it."""
    store = SlowStore(store_of_launcher())
    join_at(store)
    trained = train()
    before = store.num_accesses
    for step in range(3, 20):
        trained.step(step)
        if step == 10:
            time.sleep(SECONDS * RANK)
    assert store.num_accesses == before, (before, store.num_accesses)
    trained.check()
    leave()


# ---- handlers ----


@healthy("HEALTHY-08", launchers=("torchrun",))
def handlers_set_before() -> None:
    """A handler for SIGTERM and a wake-up descriptor get the signal. They are set before the import.

    At the end of a step, all ranks call `sys.exit(0)`.
    """
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    join()
    trained = train()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.7)
    trained.step(5)
    assert asked == [signal.SIGTERM]
    assert reader.recv(64) == bytes(asked)
    assert signal.set_wakeup_fd(-1) == writer.fileno()
    leave()
    print("right", flush=True)
    sys.exit(0)


@healthy("HEALTHY-08")
def handlers_set_later() -> None:
    """A handler for SIGTERM is set after sharding, and gets the signal. Training continues.

    The program has its own `sys.excepthook`, and passes an error to it as a shell does. Its exit handlers run in the
    order of Python, none is omitted, and the last line is theirs.
    """
    ran: list[str] = []
    shown: list[Any] = []

    def last() -> None:
        assert ran == ["second", "first"], ran
        print("right", flush=True)

    atexit.register(last)
    atexit.register(ran.append, "first")

    def show(kind: Any, error: Any, trace: Any) -> None:
        shown.append(kind)
        if kind is not LookupError:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = show
    join()
    trained, asked = train(), []
    # torch's hook calls that of the program.
    hook = sys.excepthook
    atexit.register(ran.append, "second")
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    os.kill(os.getpid(), signal.SIGTERM)
    for step in range(2):
        if step == RANK:
            try:
                raise LookupError("a typing error in a cell")
            except LookupError as error:
                sys.last_type, sys.last_value, sys.last_traceback = LookupError, error, error.__traceback__
                sys.excepthook(LookupError, error, error.__traceback__)
            time.sleep(SECONDS)
        trained.step(step)
    assert asked == [1]
    assert shown == [LookupError]
    assert sys.excepthook is hook
    trained.check()
    leave()


@healthy("HEALTHY-08", launchers=("forked",))
def two_event_loops() -> None:
    """The group is used in two calls of `asyncio.run`. In each, two coroutines train in turn, one with each API.

    The loop handles signals. Between the loops the program trains without one.
    """
    join()
    trained = Trainings()

    async def train_in_turn(each: Any, steps: range) -> None:
        for step in steps:
            each.step(step)
            await asyncio.sleep(0)

    async def main(steps: range) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, woken.set)
        await asyncio.gather(*(train_in_turn(each, steps) for each in trained.each))
        os.kill(os.getpid(), signal.SIGTERM)
        # The loop sleeps until the signal writes to its wake-up descriptor.
        await asyncio.wait_for(woken.wait(), 5)
        await asyncio.to_thread(trained.step, steps.stop)

    for begin in (0, 4):
        asyncio.run(main(range(begin, begin + 3)))
        assert signal.set_wakeup_fd(-1) == -1
        trained.step(9)
    trained.check()
    leave()


# ---- shells ----

# Typed as by a user. The error is a typing error.
TYPED = """
trained = Trainings()
trained.step(0)
trained.stp(1)
for step in range(1, 4):
    trained.step(step)

losses = [each.loss(4) for each in trained.each]
losses
for each, loss in zip(trained.each, losses):
    loss.backward()
    each.plain_backward(4)
    each.update()

trained.check()
was_checked = True
"""


@healthy("HEALTHY-12")
def console() -> None:
    """An `InteractiveConsole` trains. An error that it has shown has no effect, even at the end.

    The program does not destroy the group. Rank 0, which hosts the store, ends before rank 1.
    """
    join()
    names: dict[str, Any] = {"Trainings": Trainings}
    shell, shown = code.InteractiveConsole(names), io.StringIO()
    for line in TYPED.strip("\n").split("\n"):
        with redirect_stderr(shown):
            shell.push(line)
        time.sleep(SECONDS * ("stp" in line and RANK == 1))
    assert shown.getvalue().count("Error") == 1, shown.getvalue()
    assert names["was_checked"]
    dist.barrier()
    time.sleep(2.0 * RANK)


@healthy("HEALTHY-12")
def ipython() -> None:
    """IPython trains; the typing error leads to its traceback."""
    os.environ["IPYTHONDIR"] = str(PLACE / f"ipython-{RANK}")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    shell.push({"Trainings": Trainings})
    join()
    assert shell.run_cell(TYPED.replace("trained.stp(1)", "")).success
    assert shell.run_cell("await __import__('asyncio').sleep(0.01)\ntrained.step(5)").success
    assert isinstance(shell.run_cell("trained.stp(1)").error_in_exec, AttributeError)
    time.sleep(SECONDS * RANK)
    assert shell.run_cell("trained.step(6)\ntrained.check()").success
    dist.barrier()
    time.sleep(2.0 * RANK)


# ---- children ----


class Numbers(Dataset):  # type: ignore[type-arg]
    """Inputs of the net. Each takes ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def import_the_package(worker: int) -> None:
    """A worker imports the modules of the program, and so this package."""
    import minifsdp

    assert minifsdp.__name__ in sys.modules


@healthy("HEALTHY-09")
def data_workers() -> None:
    """Workers feed the training, by fork and by spawn. A time-out of a DataLoader that the program catches has no
    effect."""
    join()
    trained = train()
    for method in ("fork", "spawn"):
        options = {"num_workers": 1, "multiprocessing_context": method, "worker_init_fn": import_the_package}
        for rows in DataLoader(Numbers(), batch_size=4, **options):
            for each in trained.each:
                each.model(rows).square().mean().backward()
                # All ranks have the same batch.
                each.plain(rows).square().mean().backward()
                each.update()
    if RANK == 1:
        with pytest.raises(RuntimeError, match="timed out"):
            list(DataLoader(Numbers(20.0), num_workers=1, timeout=2.5, multiprocessing_context="fork"))
    trained.step(3)
    trained.check()
    leave()


@healthy("HEALTHY-09")
def fork_that_fails_between_steps() -> None:
    """Each rank forks a child while its group exists. The child ends with an uncaught error, and the ranks continue to
    train."""
    join(30.0)
    trained = train()
    dist.barrier()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        # A child that still has the watchdog of its parent may wait forever.
        signal.alarm(20)
        raise RuntimeError("only in the child")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    for step in range(3, 5):
        trained.step(step)
    trained.check()
    leave()


# ---- the end of ranks ----


@healthy("HEALTHY-10")
def rank_1_ends_later() -> None:
    """The group is destroyed; rank 1 continues for 4 s. Rank 0, which hosts the store, ends at once."""
    join()
    train()
    leave()
    time.sleep(4.0 * (RANK == 1))


@healthy("HEALTHY-10", launchers=("plain", "torchrun"))
def rank_1_ends_early() -> None:
    """No rank destroys the group; rank 1 ends, and rank 0 computes alone for 4 s."""
    join()
    trained = train()
    dist.barrier()
    if RANK == 0:
        time.sleep(4)
        trained.each[0].plain_backward(9)


# ---- a rank ----

awake_at = []


def seconds_asleep() -> float:
    """The time that the main thread has slept since a fixed time, neither running nor waiting for a core."""
    ran, waited, _ = map(int, Path("/proc/self/schedstat").read_text().split())
    return time.monotonic() - (ran + waited) / 1e9


@atexit.register
def tell() -> None:
    """Registered before the package is imported, so it runs after the exit handlers of the package."""
    for before in awake_at:
        print(f"slept {seconds_asleep() - before:.2f} s", flush=True)


def main() -> None:
    name = sys.argv[1]
    torch.set_num_threads(1)
    try:
        globals()[name]()
        if name != "handlers_set_later":
            print("right", flush=True)
    finally:
        awake_at.append(seconds_asleep())


if __name__ == "__main__":
    if "HEALTHY_FOLDER" in os.environ:
        main()
    else:
        # Not at the top, because this also imports the package.
        from spec_tools.processes.ranks import end_as_python_does

        end_as_python_does(main)
