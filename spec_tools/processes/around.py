"""Programs in which something surrounds the training: a launcher, a shell, an event loop, data workers, a slow store.

Each is called on every rank after import, and initializes its groups itself. Most train with both APIs.

Spec: HEALTHY-06 to HEALTHY-09, HEALTHY-11 to HEALTHY-13.
"""

from __future__ import annotations

import asyncio
import code
import io
import os
import signal
import sys
import time
from contextlib import redirect_stderr
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from spec_tests.ports import free_port
from spec_tools.processes import programs
from spec_tools.processes.launch import SECOND_RUN
from spec_tools.processes.programs import PLACE, RANK, SECONDS, WORLD, join, leave, training

APIS = ("wrapper", "fully_shard")


def trainings() -> list[Any]:
    """A training with each API."""
    return [training(api) for api in APIS]


def step_all(trained: list[Any], step: int) -> None:
    for each in trained:
        each.step(step)


def check_all(trained: list[Any]) -> None:
    for each in trained:
        each.check()


# ---- launchers ----


def save(trained: list[Any]) -> None:
    """Rank 0 writes the full state dicts."""
    from spec_tests.healthy.programs.support import state_dict_of

    states = [dict(state_dict_of(each.model)) for each in trained]
    if RANK == 0:
        torch.save(states, PLACE / "checkpoint.pt")
    dist.barrier()


def resume(trained: list[Any]) -> None:
    """Loads what `save` wrote."""
    from spec_tests.healthy.programs.support import FSDP, package

    wrapped, sharded = torch.load(PLACE / "checkpoint.pt", weights_only=True)
    with FSDP.state_dict_type(trained[0].model, package.StateDictType.FULL_STATE_DICT):
        trained[0].model.load_state_dict(wrapped)
    with torch.no_grad():
        for name, parameter in trained[1].model.named_parameters():
            whole = torch.distributed.tensor.distribute_tensor(sharded[name], parameter.device_mesh)
            parameter.copy_(whole)


def one_rank_raises_once(api: str) -> None:
    """Rank 1 raises in step 3. torchrun restarts the job, which resumes from step 2. Then a rank is late."""
    is_second = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    if is_second:
        print(SECOND_RUN, file=sys.stderr, flush=True)
    programs.join_again(int(is_second), programs.store_of_launcher())
    trained = trainings()
    if is_second:
        resume(trained)
        for each in trained:
            for step in range(3):
                each.plain_backward(step)
                each.plain_optimizer.step()
                each.plain_optimizer.zero_grad()
    for step in range(3 if is_second else 0, 6):
        if step == 3 and RANK == 1:
            if not is_second:
                loss = trained[1].loss(step)
                raise ValueError(f"a bad batch; loss {loss.item():.3f}")
            time.sleep(SECONDS)
        step_all(trained, step)
        if step == 2:
            save(trained)
    check_all(trained)
    leave()


def train_in_a_child(rank: int, address: str, results: Any) -> None:
    programs.RANK, programs.WORLD = rank, 2
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    from spec_tests.healthy.programs.support import full_parameters

    trained = trainings()
    for step in range(4):
        step_all(trained, step)
    results.put((rank, [{name: value.numpy() for name, value in full_parameters(t.model).items()} for t in trained]))
    # Rank 0 hosts the store and ends first.
    leave()
    time.sleep(2.0 * rank)


def spawned_with_results(api: str) -> None:
    """`torch.multiprocessing.spawn` starts two ranks; rank 0 hosts the store. The parent compares their parameters."""
    from spec_tests.healthy.programs.support import Net, batch

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    address = f"tcp://127.0.0.1:{free_port()}"
    results = torch.multiprocessing.get_context("spawn").Queue()
    ranks = torch.multiprocessing.spawn(train_in_a_child, (address, results), nprocs=2, join=False)
    torch.manual_seed(0)
    plain = Net(1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for of_rank in range(2):
            (plain(batch(of_rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _, found in (results.get(timeout=60) for _ in range(2)):
        for parameters in found:
            values = {name: torch.from_numpy(value) for name, value in parameters.items()}
            torch.testing.assert_close(values, dict(plain.named_parameters()), rtol=1e-4, atol=1e-5)
    while not ranks.join():
        pass


# ---- data workers ----


class Rows(Dataset):  # type: ignore[type-arg]
    """16 inputs of the net."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def import_the_package(worker: int) -> None:
    """A worker imports the modules of the program, and so this package."""
    import minifsdp

    assert minifsdp.__name__ in sys.modules


def workers_by_spawn_around_training(api: str) -> None:
    """Training reads its batches from a worker process, which is spawned and stays for two epochs."""
    join()
    trained = trainings()
    data = Rows()
    samplers = [DistributedSampler(data, WORLD, rank, shuffle=False) for rank in range(WORLD)]
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=samplers[RANK],
        num_workers=1,
        multiprocessing_context="spawn",
        persistent_workers=True,
        worker_init_fn=import_the_package,
    )
    batches_of_all = [list(DataLoader(data, batch_size=4, sampler=sampler)) for sampler in samplers]
    for _ in range(2):
        for number, rows in enumerate(loader):
            for each in trained:
                each.model(rows).square().mean().backward()
                for batches in batches_of_all:
                    (each.plain(batches[number]).square().mean() / WORLD).backward()
                each.update()
    check_all(trained)
    leave()


# ---- shells ----

# Typed as by a user. The error is a typing error.
TYPED = """
trained = trainings()
step_all(trained, 0)
step_all(trianed, 1)
for step in range(1, 4):
    step_all(trained, step)

trained[0].model
losses = [each.loss(4) for each in trained]
losses
for each, loss in zip(trained, losses):
    loss.backward()
    each.plain_backward(4)
    each.update()

check_all(trained)
was_checked = True
"""


def console(api: str) -> None:
    """An `InteractiveConsole` trains. An error that it has shown has no effect, even at the end.

    The program does not destroy the group. Rank 0, which hosts the store, ends before rank 1.
    """
    join()
    names: dict[str, Any] = {"trainings": trainings, "step_all": step_all, "check_all": check_all}
    shell, shown = code.InteractiveConsole(names), io.StringIO()
    for line in TYPED.strip("\n").split("\n"):
        with redirect_stderr(shown):
            shell.push(line)
        time.sleep(SECONDS * ("trianed" in line and RANK == 1))
    assert shown.getvalue().count("Error") == 1, shown.getvalue()
    assert names["was_checked"]
    dist.barrier()
    time.sleep(2.0 * RANK)


def ipython(api: str) -> None:
    """IPython trains; each block is a cell, and the typing error leads to its traceback."""
    os.environ["IPYTHONDIR"] = str(PLACE / f"ipython-{RANK}")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    shell.push({"trainings": trainings, "step_all": step_all, "check_all": check_all})
    join()
    cells = [
        "trained = trainings()",
        "step_all(trained, 0)",
        "for step in range(1, 4):\n    step_all(trained, step)\ntrained[0].model",
        "losses = [each.loss(4) for each in trained]\nlosses",
        "for each, loss in zip(trained, losses):\n    loss.backward()\n    each.plain_backward(4)\n    each.update()",
        "check_all(trained)",
        "await __import__('asyncio').sleep(0.01)\nstep_all(trained, 5)",
    ]
    for cell in cells:
        assert shell.run_cell(cell).success
    failed = shell.run_cell("step_all(trianed, 1)")
    assert isinstance(failed.error_in_exec, NameError)
    time.sleep(SECONDS * RANK)
    assert shell.run_cell("step_all(trained, 6)\ncheck_all(trained)").success
    dist.barrier()
    time.sleep(2.0 * RANK)


# ---- an event loop ----


def two_event_loops(api: str) -> None:
    """The group is used in two calls of `asyncio.run`. In each, two coroutines train in turn, one with each API.

    Another task runs periodically, and the loop handles signals. Between the loops the program trains without one.
    """
    join()
    trained = trainings()
    step_all(trained, 0)

    async def train(each: Any, steps: range) -> None:
        for step in steps:
            each.step(step)
            await asyncio.sleep(0)

    async def tick(ticks: list[float]) -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def main(steps: range) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(number, woken.set)
        ticks: list[float] = []
        ticking = asyncio.create_task(tick(ticks))
        await asyncio.gather(*(train(each, steps) for each in trained))
        for number in (signal.SIGTERM, signal.SIGUSR1):
            woken.clear()
            os.kill(os.getpid(), number)
            await asyncio.wait_for(woken.wait(), 5)
        await asyncio.to_thread(step_all, trained, steps.stop)
        ticking.cancel()
        assert len(ticks) > 2

    for begin in (1, 5):
        asyncio.run(main(range(begin, begin + 3)))
        assert signal.set_wakeup_fd(-1) == -1
        step_all(trained, 9)
    check_all(trained)
    leave()


# ---- stores ----


def hash_store_and_file_store(api: str) -> None:
    """First each process trains alone, with a `HashStore`. Then both train together, with a `FileStore`."""
    join(store=dist.HashStore(), rank=0, world_size=1)
    alone = trainings()
    for step in range(2):
        step_all(alone, step)
    check_all(alone)
    dist.destroy_process_group()
    join(store=dist.FileStore(str(PLACE / "together"), WORLD), rank=RANK, world_size=WORLD)
    trained = trainings()
    for step in range(3):
        time.sleep(SECONDS * (step == 1 and RANK == 1))
        step_all(trained, step)
    check_all(trained)
    leave()


class SlowStore(dist.Store):
    """A store in Python. Each access takes 50 ms.

    Args:
        store: the store that holds the values.

    Attributes:
        num_accesses: so far.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self.num_accesses = store, 0

    def _call(self, name: str, *arguments: Any) -> Any:
        self.num_accesses += 1
        time.sleep(0.05)
        return getattr(self._store, name)(*arguments)

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> Any:
        return self._call("get", key)

    def add(self, key: str, value: int) -> Any:
        return self._call("add", key, value)

    def check(self, keys: Any) -> Any:
        return self._call("check", keys)

    def wait(self, keys: Any, *timeout: Any) -> None:
        self._call("wait", keys, *timeout)

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        return self._call("compare_set", key, expected, value)

    def delete_key(self, key: str) -> Any:
        return self._call("delete_key", key)


def slow_store(api: str) -> None:
    """The store is a class in Python whose accesses take 50 ms. After the first steps, training does not access it."""
    store = SlowStore(programs.store_of_launcher())
    join(store=store, rank=RANK, world_size=WORLD)
    trained = trainings()
    for step in range(3):
        step_all(trained, step)
    before = store.num_accesses
    for step in range(3, 20):
        step_all(trained, step)
        if step == 10:
            time.sleep(SECONDS * RANK)
    assert store.num_accesses == before, (before, store.num_accesses)
    check_all(trained)
    leave()


async def delayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies a stream, 25 ms later."""
    while data := await reader.read(65536):
        await asyncio.sleep(0.025)
        writer.write(data)
    writer.close()


async def slow_network(port: int, to: int, ready: int) -> None:
    """Passes connections to ``port`` on to the port ``to``. Closes the descriptor ``ready`` when it accepts them."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(delayed(reader, their_writer), delayed(their_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(accept, "127.0.0.1", port) as server:
        os.close(ready)
        await server.serve_forever()


def started_slow_network(port: int, to: int) -> int:
    """Starts `slow_network` in a child, waits until it accepts connections, and returns the child's process number."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(slow_network(port, to, writable))
        finally:
            os._exit(1)
    os.close(writable)
    os.read(readable, 1)
    os.close(readable)
    return child


def store_behind_a_slow_network(api: str) -> None:
    """All ranks reach the store over a network that delays each message by 25 ms, and a rank is late."""
    host, port, server, child = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, 0
    if RANK == 0:
        server = TCPStore(host, 0, WORLD, True, wait_for_workers=False)
        child = started_slow_network(port, server.port)
    try:
        join(store=TCPStore(host, port, WORLD, False), rank=RANK, world_size=WORLD)
        trained = trainings()
        for step in range(4):
            time.sleep(SECONDS * (step == 2 and RANK == 1))
            step_all(trained, step)
        check_all(trained)
        leave()
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
