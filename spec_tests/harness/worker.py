"""The worker process of one rank: it receives a test, runs the body, restores the process state, and answers.

A rank runs hundreds of tests, so every test must start in the same state. For each test, the worker does this:

1. Set fresh seeds, the warning filters of the session, and a time-out for collectives well below the test's limit. So
   a collective that another rank does not issue ends in an error with a traceback, not in a killed process.
2. Run the body. Its errors are formatted like pytest's (``assert a == b`` shows both values), because the module
   is imported with pytest's assertion rewriting.
3. Restore the environment, the working directory and torch's global switches, and collect garbage, because a model
   that is still alive also keeps its hooks. Process groups are destroyed when the next test arrives.

The answer also contains the number of collectives on the default group. If ranks disagree about it, the *next* test
would hang, although it is correct.

Two ranks, one test whose assertion fails on rank 1 only::

    rank 0   waits in all_reduce ....................... writes its stacks on request, killed 3 s later
    rank 1   AssertionError, answers at once             the test fails with its traceback

Limitation: ranks that are forked from one server share its hash seed, so a set of strings has the same order on all of
them. Under torchrun the orders differ. Code that needs equal orders passes here. The tests of the tutorials, which
start real programs, cover this case.

*In torch:* ``MultiProcContinuousTest`` of ``torch.testing._internal`` keeps processes for one class of tests.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

# Not used here. The fork server imports this module once, so the ranks do not have to import these again.
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import debug
from torch.distributed.tensor._redistribute import _gen_transform_infos

from spec_tests.harness import simulated

__all__ = [
    "REWRITTEN",
    "Answer",
    "Seat",
    "Task",
    "choose_device",
    "join_default_group",
    "kept",
    "leftover_groups",
    "serve",
]

# Modules that are not test files, but whose assertions must also show values.
REWRITTEN = (
    *(
        f"spec_tests.{folder.name}"
        for folder in pathlib.Path(__file__).parents[1].iterdir()
        if folder.is_dir() and folder.name != "harness"
    ),
    "spec_tools.explain",
    "spec_tools.processes",
    "spec_tools.simulate",
    "spec_tools.tutorials",
)

T = TypeVar("T")
device_here = torch.device("cpu")


@dataclass(frozen=True)
class Seat:
    """The configuration of one worker process.

    Attributes:
        rank: its rank; local and global are the same.
        num_ranks: size of the default group.
        kind: ``"cpu"``, ``"cuda"`` or ``"simulated"``.
        folder: the pool's folder, for the rendezvous, output and stacks.
        port: a free port, for a test that destroys the default group and creates a new one with ``env://``.
        path: ``sys.path`` of the session.
        is_alone: whether the other ranks of the group are fake (see ``simulated/nccl.py``).
    """

    rank: int
    num_ranks: int
    kind: str
    folder: pathlib.Path
    port: int
    path: list[str] = field(default_factory=lambda: list(sys.path))
    is_alone: bool = False

    @property
    def output(self) -> pathlib.Path:
        """The file with the current test's stdout and stderr, including the output of C++."""
        return self.folder / f"output-{self.rank}"

    @property
    def stacks(self) -> pathlib.Path:
        """The file with the stacks of all threads, written on SIGUSR1."""
        return self.folder / f"stacks-{self.rank}"


@dataclass(frozen=True)
class Task:
    """One test: the location of its body, the pickled keyword arguments, its limit in seconds, and warning filters."""

    module: str
    name: str
    arguments: bytes
    limit: float
    filters: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The result of a test on one rank.

    Attributes:
        failure: ``None``, or the text to show.
        num_collectives: on the default group since it was created.
        reusable: whether the rank still has the default group that it started with.
    """

    failure: str | None = None
    num_collectives: int = 0
    reusable: bool = True


def serve(seat: Seat, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of a rank's process. Does not return."""
    # Ctrl-C reaches the whole foreground group; the session handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_session, daemon=True).start()
    stacks = seat.stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _redirect_output(seat.output)
    faulthandler.enable()
    sys.path[:] = seat.path
    try:
        _inside_pytest(lambda: _answer_until_closed(seat, pipe))
    except BaseException as error:  # the session must receive any error
        with contextlib.suppress(OSError):
            pipe.send(Answer(_traceback(error)))
    # Not sys.exit: destructors of torch can wait for ranks that have ended.
    os._exit(0)


def _end_with_the_session() -> None:
    """Ends this process when pytest has ended for any reason, even if the body hangs in a collective."""
    session = multiprocessing.parent_process()
    if session is not None:
        multiprocessing.connection.wait([session.sentinel])
        os._exit(1)


def _redirect_output(path: pathlib.Path) -> None:
    """Redirects the file descriptors, which C++ uses. Appends, because the session truncates the file between tests."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    # In a process forked from a server, these two can belong to a closed file.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)


# ---- pytest's assertion rewriting -----------------------------------------------------------------------------------


def _inside_pytest(serve_tests: Callable[[], None]) -> None:
    """Calls the function in place of a pytest session: assertion rewriting is installed, and nothing else."""

    class InsteadOfASession:
        @pytest.hookimpl(tryfirst=True)
        def pytest_cmdline_main(self, config: pytest.Config) -> int:
            pytest.register_assert_rewrite(*REWRITTEN)
            _explain_comparisons(config)
            os.environ.clear()
            os.environ.update(environment)
            serve_tests()
            return 0

    # The models of tests are so small that the default transport would not be used for their parameters.
    environment = {"MINIFSDP_TRANSPORT": "messages", **os.environ}
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments = ["-s", "-vv", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    pytest.main(arguments, plugins=[InsteadOfASession()])


def _explain_comparisons(config: pytest.Config) -> None:
    """Makes ``assert a == b`` show the difference, as in the pytest process.

    pytest sets this up around each test item, and a rank has no items. The name is private to pytest. Without it, an
    assertion shows the two values and no difference.
    """
    from _pytest.assertion import util

    def explain(op: str, left: object, right: object) -> str | None:
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    util._reprcompare = explain


# ---- running tests --------------------------------------------------------------------------------------------------


def _answer_until_closed(seat: Seat, pipe: multiprocessing.connection.Connection) -> None:
    join_default_group(seat)
    group = dist.group.WORLD
    home = Surroundings()
    # Imported objects stay alive. Freezing them reduces the collection after each test from 200 ms to 1 ms.
    gc.freeze()
    pipe.send(Answer())
    # A closed pipe means that the session has closed this pool.
    with contextlib.suppress(EOFError, ConnectionError):
        for number in itertools.count(1):
            task: Task = pipe.recv()
            home.prepare(task.limit)
            failure = _run(task)
            home.restore()
            pipe.send(Answer(failure, _num_collectives(), dist.group.WORLD is group))
            if number % 100 == 0:
                # Objects that are still alive after so many tests are in torch's caches.
                gc.freeze()


def choose_device(seat: Seat) -> torch.device:
    """Selects the device of this rank, without a process group. Returns it."""
    if seat.kind == "cuda":
        device = _choose_gpu(seat)
        torch.cuda.set_device(device)
        return device
    return simulated.install() if seat.kind == "simulated" else torch.device("cpu")


def join_default_group(seat: Seat) -> None:
    """Selects the device of this rank, and creates the default group. All ranks must call it."""
    global device_here
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(seat.num_ranks),
        LOCAL_WORLD_SIZE=str(seat.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.port),
    )
    if sys.platform == "linux":
        # Otherwise gloo resolves the host name, which can fail in a container or on a laptop.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device_here = choose_device(seat)
    if seat.kind != "cuda":
        # Otherwise each manual_seed() records its call stack in case an accelerator is initialized later: 6 ms.
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = _seed_nothing
    if seat.is_alone:
        store = simulated.STORE_OF_ONE_PROCESS
        dist.init_process_group("simulated", rank=seat.rank, world_size=seat.num_ranks, store=store)
        return
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl", "simulated": "simulated"}[seat.kind],
        init_method=f"file://{seat.folder}/store",
        rank=seat.rank,
        world_size=seat.num_ranks,
        # NCCL creates its communicator now, not in the middle of the first test, and has a device for barriers.
        device_id=device_here if seat.kind == "cuda" else None,
    )


def _seed_nothing(seed: int) -> None:
    pass


def _choose_gpu(seat: Seat) -> torch.device:
    """One GPU per rank if there are enough. Otherwise all ranks share the first."""
    if torch.cuda.device_count() >= seat.num_ranks:
        return torch.device("cuda", seat.rank)
    # NCCL refuses two ranks of one host on one GPU, so each rank gets a different host ID.
    os.environ.update(NCCL_HOSTID=f"rank{seat.rank}", NCCL_SOCKET_IFNAME="lo")
    return torch.device("cuda", 0)


def _num_collectives() -> int:
    # torch's monitored barrier compares the same number; the type stubs do not declare it.
    group: Any = dist.group.WORLD
    return group._get_sequence_number_for_group() if group is not None else 0


def _run(task: Task) -> str | None:
    """Runs one body. Returns ``None`` if it passed, and otherwise the text to show."""
    with warnings.catch_warnings():
        try:
            for filter_ in task.filters:
                _apply_filter(filter_)
            body = _find(task.module, task.name)
            body(**pickle.loads(task.arguments))
            if device_here.type == "sim":
                simulated.WORLD.assert_no_race()
        except (pytest.skip.Exception, pytest.xfail.Exception) as outcome:
            return (
                f"{outcome!r}: a body that runs on ranks either passes or fails. Mark the test, or leave the case out."
            )
        except BaseException as error:  # also SystemExit: a rank that exits would end the pool
            return _traceback(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    return None


def _find(module: str, name: str) -> Callable[..., None]:
    """The undecorated body."""
    if module not in sys.modules:
        importlib.import_module(module)
        gc.collect()
        gc.freeze()
    body: Callable[..., None] = getattr(sys.modules[module], name).body_on_a_rank
    return body


def _traceback(error: BaseException) -> str:
    """The error as pytest shows it, without the frames of this file."""
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    if error.__traceback__ is None:
        return f"{type(error).__name__}: {error}"
    return str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short"))


def _apply_filter(text: str) -> None:
    """Applies ``action:message:category:module`` as in pytest's configuration; message and module are patterns."""
    action, message, category, module = [part.strip() for part in (text.split(":") + [""] * 3)[:4]]
    kind: Any = Warning
    if category:
        where, _, name = category.rpartition(".")
        kind = getattr(importlib.import_module(where) if where else builtins, name)
    warnings.filterwarnings(action, message, kind, module)  # type: ignore[arg-type]


_kept: dict[object, Any] = {}
_kept_groups: set[Any] = set()


def kept(key: object, make: Callable[[], T]) -> T:
    """The result of ``make``, created by the first test that needs it. Its process groups stay for later tests.

    Most tests with several groups use the same ones. DTensor computes the communication of each operation on each mesh,
    which takes ten times as long as the operation, and loses it when the groups are destroyed. All ranks must call it.
    """
    if device_here.type == "sim":
        # On the simulated device, each test starts with a new world.
        return make()
    if key not in _kept:
        before = set(c10d._world.pg_map)
        _kept[key] = make()
        _kept_groups.update(set(c10d._world.pg_map) - before)
    found: T = _kept[key]
    return found


def leftover_groups() -> list[Any]:
    """The process groups that a test has created."""
    return [group for group in c10d._world.pg_map if group is not dist.group.WORLD and group not in _kept_groups]


def _destroy_leftover_groups() -> None:
    leftover = leftover_groups()
    for group in leftover:
        dist.destroy_process_group(group)
    if leftover:
        forget_meshes()


def forget_meshes() -> None:
    """Clears caches of DTensor. Call it after groups were destroyed.

    DTensor caches results by mesh, and a later mesh can compare equal to one whose groups were destroyed ("could not
    resolve the process group registered under the name ...").
    """
    debug._clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    if device_here.type == "cuda":
        # Autograd's thread for a GPU has its own cache. A log of the simulated device must not contain this step.
        loss = torch.ones((), device=device_here, requires_grad=True) * 1
        loss.register_hook(lambda _: debug._clear_sharding_prop_cache())
        loss.backward()


# torch 2.14 has made it public, and warns about the private name.
_set_torch_time_limit: Callable[..., None] = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout


def _set_time_limit(limit: timedelta, group: Any) -> None:
    if device_here.type == "sim":
        group.set_timeout(limit)
    else:
        _set_torch_time_limit(limit, group)


class Surroundings:
    """The process state that is the same before every test. Created once, when the rank has its default group."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.folder = pathlib.Path.cwd()
        self.limit = 0.0

    def prepare(self, limit: float) -> None:
        """Sets the seeds, and the time-out of collectives on the default group. ``limit`` is in seconds."""
        # Not at the end of the previous test, because another rank could still be connecting to this one. A new test
        # arrives only after every rank has answered.
        _destroy_leftover_groups()
        torch.manual_seed(0)
        random.seed(0)
        # With NCCL, a time-out ends the process without the stacks, so only the limit applies.
        if device_here.type != "cuda" and limit != self.limit:
            _set_time_limit(timedelta(seconds=0.75 * limit), dist.group.WORLD)
            self.limit = limit
        if device_here.type == "sim":
            simulated.WORLD.begin()

    def restore(self) -> None:
        """Restores the global state that a body can have changed."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        if torch.are_deterministic_algorithms_enabled():  # checked first, because the setter imports half of torch
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        gc.collect()
