"""Programs that need their own processes. Each is called on every rank after import, and initializes its groups itself.

Spec: HEALTHY-06 to HEALTHY-10.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
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

SECONDS = 3.0  # longer than the watchdog waits before it queries the other ranks
PLACE = Path(os.environ.get("HEALTHY_FOLDER", "."))
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def join(limit: float = 300.0, **options: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit), **options)


def training(api: str, num_layers: int = 1, **options: Any) -> Any:
    """Imported here: some programs do something before the first import."""
    from spec_tests.healthy.programs.support import Net, Training

    # All ranks begin with the same parameters.
    torch.manual_seed(0)
    return Training(api, Net(num_layers), **options)


def train(api: str, seconds: float = 0.0, *, num_layers: int = 1, **options: Any) -> Any:
    """Trains three steps; rank 1 is late in the second."""
    trained = training(api, num_layers, **options)
    for step in range(3):
        if step == 1 and RANK == 1:
            time.sleep(seconds)
        trained.step(step)
    trained.check()
    return trained


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


# ---- groups and stores ----


def store_of_launcher() -> Any:
    """The store of torchrun's agent, or one that rank 0 hosts."""
    is_host = RANK == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, is_host)


def join_again(number: object, store: Any) -> None:
    """If a rank destroys its groups early, torch finds its addresses of an earlier run in a store without a prefix."""
    join(store=dist.PrefixStore(f"run {number}", store), rank=RANK, world_size=WORLD)


def destroyed_and_made_again(api: str) -> None:
    """The default group is destroyed and recreated at the same store; a rank joins late, and is late in a step."""
    store = store_of_launcher()
    for seconds in (0.0, SECONDS, 0.0):
        # A rank that connects to an old address waits for the whole limit.
        join(30.0, store=store, rank=RANK, world_size=WORLD)
        train(api, seconds)
        leave()
        time.sleep(0.5 * RANK)


def destroyed_on_one_rank_first(api: str) -> None:
    """Rank 0 destroys its groups while rank 1 continues. It waits only briefly; the store remains available."""
    store = store_of_launcher()
    join_again(0, store)
    train(api)
    dist.barrier()
    time.sleep(SECONDS * RANK)
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < 2.5
    join_again(1, store)
    train(api)
    leave()


def two_models_in_turn_with_a_store_each(api: str) -> None:
    """Two models in turn, each with a default group and a store of its own; a rank is late in the second."""
    for number, seconds in enumerate((0.0, SECONDS)):
        join(init_method=f"file://{PLACE}/store-{number}", rank=RANK, world_size=WORLD)
        train(api, seconds, num_layers=1 + number)
        leave()


def file_store(api: str) -> None:
    """The default group has a `file://` store; its file is gone when all ranks have ended (wrapper)."""
    join(init_method=f"file://{PLACE}/store", rank=RANK, world_size=WORLD)
    train(api, SECONDS)
    leave()


def prefix_store(api: str) -> None:
    """The default group has a prefix store over another prefix store."""
    join(store=dist.PrefixStore("b", dist.PrefixStore("a", store_of_launcher())), rank=RANK, world_size=WORLD)
    train(api, SECONDS)
    leave()


def hash_store(api: str) -> None:
    """A job of one rank, whose store is a `HashStore`."""
    if RANK == 0:
        join(store=dist.HashStore(), rank=0, world_size=1)
        train(api)
        leave()


def counts() -> tuple[int, int]:
    gc.collect()
    return len(threading.enumerate()), len(os.listdir("/proc/self/fd"))


def ten_groups(api: str) -> None:
    """Ten default groups one after the other leave no thread, no descriptor, no hook and no reference."""
    seen, groups = [], []
    for number in range(10):
        join(init_method=f"file://{PLACE}/store-{number}", rank=RANK, world_size=WORLD)
        groups.append(weakref.ref(dist.group.WORLD))
        train(api)
        leave()
        until = time.monotonic() + 2
        while (len(threading.enumerate()) > 1 or groups[-1]() is not None) and time.monotonic() < until:
            time.sleep(0.02)
            gc.collect()
        seen.append((*counts(), len(_global_optimizer_pre_hooks)))
    assert len({hooks for *_, hooks in seen}) == 1, seen
    assert seen[-1][0] == 1, (seen, threading.enumerate())
    assert seen[-1][1] <= seen[1][1] + 2, seen
    alive = sum(group() is not None for group in groups)
    # torch keeps the last group of some meshes.
    assert alive <= 1, alive


def groups_made_by_the_package(api: str) -> None:
    """Three default groups. In each, the package makes groups of two ranks: the nodes, or a mesh to reshard to."""
    from torch import nn

    from minifsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from minifsdp.wrap import always_wrap_policy

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    hybrid: dict[str, Any] = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    for number in range(3):
        join(init_method=f"file://{PLACE}/store-{number}", rank=RANK, world_size=WORLD)
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
    until = time.monotonic() + 2
    while any(group() is not None for group in groups) and time.monotonic() < until:
        time.sleep(0.02)
        gc.collect()
    assert [group() for group in groups] == [None] * 3


def process_as_before(api: str) -> None:
    """While a group lives, its process has one more exit handler. Afterwards nothing is left."""
    from spec_tests.harness.process_state import changes, state_of_process

    def one_run(number: int, shards: bool) -> list[str]:
        join(init_method=f"file://{PLACE}/store-{number}", rank=RANK, world_size=WORLD)
        dist.all_reduce(torch.ones(1))
        if shards:
            train(api)
        during = changes(before, state_of_process())
        leave()
        return during

    before: dict[str, Any] = {}
    # torch keeps some modules, threads and exit handlers after its first group and its first backward.
    one_run(0, shards=False)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.SGD([weight]).step()
    weakref.finalize(Numbers(), id, 0)
    before = state_of_process()
    for number in (1, 2):
        during = [change.partition(":")[0] for change in one_run(number, shards=True)]
        assert during == ["exit handlers"], during
        assert (found := changes(before, state_of_process())) == [], found


def ten_new_groups(api: str) -> None:
    """Ten groups in addition to the default group, each created, used and destroyed."""
    join()
    train(api)
    seen, groups = [], []
    for _ in range(10):
        group = dist.new_group([0, 1])
        groups.append(weakref.ref(group))
        train(api, group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        time.sleep(0.1)
        seen.append(counts())
    assert seen[-1][0] <= seen[1][0] and seen[-1][1] <= seen[1][1] + 2, seen
    leave()


def host_of_the_store_leaves(api: str) -> None:
    """Rank 0 hosts the store and leaves; ranks 1 and 2 continue in a group of their own, and save."""
    join(store=store_of_launcher(), rank=RANK, world_size=WORLD)
    group = dist.new_group([1, 2])
    if RANK > 0:
        from spec_tests.healthy.programs.support import state_dict_of

        trained = training(api, ranks=(1, 2), group=group)
        trained.step(0)
    dist.barrier()
    if RANK > 0:
        time.sleep(1.5)
        trained.step(1)
        state = state_dict_of(trained.model)
        torch.testing.assert_close(dict(state), dict(trained.plain.state_dict()), rtol=1e-4, atol=1e-5)
        trained.step(2)
        trained.check()


def no_temporary_folder(api: str) -> None:
    """There is no writable folder for temporary files, and a rank is late."""
    os.environ["MINIFSDP_LEDGER_DIR"] = "/proc/absent"
    tempfile._candidate_tempdir_list = lambda: ["/proc/absent"]  # type: ignore[attr-defined]
    tempfile.tempdir = None
    join()
    train(api, SECONDS)
    leave()


def started_again(api: str) -> None:
    """Every rank ends with status 1 in its first run; torchrun starts the job again."""
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    join_again(restarts, store_of_launcher())
    trained = training(api)
    trained.step(0)
    if restarts == "0":
        dist.barrier()
        os._exit(1)
    train(api, SECONDS)
    leave()


def late_at_every_place(api: str) -> None:
    """Rank 1 is late once before sharding, forward, backward, an optimizer step, an evaluation and a save."""
    from spec_tests.healthy.programs.support import batch, state_dict_of

    join()
    seconds = 2.6 * (RANK == 1)
    time.sleep(seconds)
    trained = training(api)
    trained.step(0)
    time.sleep(seconds)
    loss = trained.loss(1)
    time.sleep(seconds)
    loss.backward()
    time.sleep(seconds)
    trained.plain_backward(1)
    trained.update()
    with torch.no_grad():
        time.sleep(seconds)
        trained.model(batch(RANK, 0))
    time.sleep(seconds)
    state_dict_of(trained.model)
    trained.step(2)
    trained.check()
    leave()


def training_in_a_child(rank: int, api: str, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    global RANK, WORLD
    RANK, WORLD = rank, 2
    join()
    train(api, SECONDS)
    leave()


def spawned(api: str) -> None:
    """`torch.multiprocessing.spawn` starts the ranks."""
    if RANK == 0:
        torch.multiprocessing.spawn(training_in_a_child, (api, free_port()), nprocs=2)


# ---- handlers ----


def sigterm_handler_set_later(api: str) -> None:
    """A trainer sets its handler for SIGTERM after sharding. The signal arrives; the trainer continues and saves."""
    from spec_tests.healthy.programs.support import state_dict_of

    join()
    trained, asked = train(api), []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    os.kill(os.getpid(), signal.SIGTERM)
    for step in range(4):
        time.sleep(0.4)
        trained.step(step)
    assert asked == [1]
    state_dict_of(trained.model)
    leave()


def sigterm_handler_set_before(api: str) -> None:
    """The handler is set before the import. It calls `sys.exit(0)` on all ranks at the end of a step."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    join()
    trained = train(api)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.7)
    stop = torch.tensor(len(asked))
    dist.all_reduce(stop)
    assert int(stop) == 1
    trained.step(5)
    leave()
    print("right", flush=True)
    sys.exit(0)


def asyncio_around_training(api: str) -> None:
    """A coroutine trains while the event loop handles signals; a signal wakes the loop."""

    async def main() -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        join()
        loop.add_signal_handler(signal.SIGTERM, woken.set)
        trained = train(api)
        os.kill(os.getpid(), signal.SIGTERM)
        # The loop sleeps until the signal writes to its wake-up descriptor.
        await asyncio.wait_for(woken.wait(), 5)
        await loop.run_in_executor(None, trained.step, 9)
        trained.check()
        leave()

    asyncio.run(main())


def wakeup_descriptor(api: str) -> None:
    """A wake-up descriptor of the program, set before or after sharding, is kept and receives the signals."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno())
    join()
    trained = train(api)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
    assert reader.recv(64) == bytes([signal.SIGUSR1])
    trained.step(5)
    assert signal.set_wakeup_fd(-1) == writer.fileno()
    leave()


def own_excepthook(api: str) -> None:
    """The program replaces `sys.excepthook`, passes an error to it as a shell does, and continues training."""
    shown: list[Any] = []

    def show(kind: Any, error: Any, trace: Any) -> None:
        shown.append(kind)
        if kind is not LookupError:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = show
    join()
    trained = train(api)
    mine = sys.excepthook
    for step in range(2):
        try:
            if step == RANK:
                raise LookupError("a typing error in a cell")
        except LookupError:
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # type: ignore[assignment]
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            time.sleep(SECONDS)
        trained.step(step)
    assert shown == [LookupError] and sys.excepthook is mine
    trained.check()
    leave()


def exit_handlers(api: str) -> None:
    """Exit handlers of the program run in the order of Python, none is omitted, and the last line is theirs."""
    ran: list[str] = []

    def last() -> None:
        assert ran == ["second", "first"], ran
        print("right", flush=True)

    atexit.register(last)
    atexit.register(ran.append, "first")
    join()
    train(api)
    atexit.register(ran.append, "second")
    leave()


def exit_handlers_without_destroying(api: str) -> None:
    """The same if the program does not destroy the group before the process ends."""
    atexit.register(print, "right", flush=True)
    join()
    train(api)
    dist.barrier()


# ---- children ----


class Numbers(Dataset):  # type: ignore[type-arg]
    """A data set; the item -1 takes long."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor(float(index))


def data_loader(api: str) -> None:
    """DataLoader workers, by fork and by spawn, and a time-out of a DataLoader that the program catches."""
    join()
    trained = train(api)
    for step, method in enumerate(("fork", "spawn")):
        loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context=method)
        assert sum(item.item() for item in loader) == 28
        trained.step(step)
    if RANK == 1:
        with pytest.raises(RuntimeError, match="timed out"):
            list(DataLoader(Numbers(20.0), num_workers=1, timeout=2.5, multiprocessing_context="fork"))
    trained.step(3)
    trained.check()
    leave()


def fork_that_ends_as_programs_do(api: str) -> None:
    """A child that is forked after the import, before the groups exist, ends with `sys.exit`. Then a rank is late."""
    from spec_tests.healthy.programs import support

    assert support
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    join()
    train(api, SECONDS)
    leave()


def fork_that_fails_between_steps(api: str) -> None:
    """Each rank forks a child while its group exists. The child ends with an uncaught error, and the ranks continue to
    train."""
    join(30.0)
    trained = train(api)
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


def rank_1_ends_later(api: str) -> None:
    """The group is destroyed; rank 1 continues for 4 s. Rank 0, which hosts the store, ends at once."""
    join()
    train(api)
    leave()
    time.sleep(4.0 * (RANK == 1))


def rank_0_ends_later(api: str) -> None:
    """The group is destroyed; rank 0 continues for 4 s."""
    join()
    train(api)
    leave()
    time.sleep(4.0 * (RANK == 0))


def rank_1_ends_early(api: str) -> None:
    """No rank destroys the group; rank 1 ends, and rank 0 computes alone for 4 s."""
    join()
    trained = train(api)
    dist.barrier()
    if RANK == 0:
        time.sleep(4)
        trained.plain_backward(9)
