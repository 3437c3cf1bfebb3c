"""What one rank does: it takes a test from its pipe, runs the body, tidies up, and answers.

A rank outlives hundreds of tests, so every test must find the same world, whatever the one before it did. The order
for each:

1. fresh seeds, the warning filters of the session, and a time-out for collectives well under the test's limit, so that
   a collective that nobody joins ends in an error with a traceback and not in a killed process;
2. the body. What it raises is written down with pytest's eyes (``assert a == b`` shows both values), because the module
   is imported with pytest's assertion rewriting;
3. environment, working directory and torch's global switches go back to what they were, and garbage is collected,
   since a model that is still alive also keeps its hooks. Groups go when the next test comes.

The answer says more than passed or failed. It carries how many collectives the default group has seen: ranks that
disagree about that would hang the *next* test, which is innocent.

Two ranks, one test whose assertion fails on rank 1 only::

    rank 0   waits in all_reduce ....................... asked for its stacks and killed 3 s later
    rank 1   AssertionError, answers at once             its traceback is the test's

Price: ranks that were forked from one server share its hash seed, so a set of strings has the same order on all of
them. Under torchrun it has not. Code that is right only if the orders agree passes here; the tutorials' tests, which
start real programs, are there for that.

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

# Not used here. The fork server imports this module once, and what it has imported costs the ranks nothing.
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import debug
from torch.distributed.tensor._redistribute import _gen_transform_infos

from spec_tests.harness import simulated

__all__ = ["REWRITTEN", "Answer", "Seat", "Task", "kept", "leftover_groups", "serve"]

# Modules beside the tests proper whose assertions are to show values as well.
REWRITTEN = tuple(
    f"spec_tests.{name}"
    for name in ("checkpoint", "compat", "engine", "fsdp1", "fsdp2", "healthy", "models", "oracles", "tutorials")
)

T = TypeVar("T")
device_here = torch.device("cpu")


@dataclass(frozen=True)
class Seat:
    """Where a rank sits.

    Attributes:
        rank: its rank; local and global are the same.
        num_ranks: size of the default group.
        kind: ``"cpu"``, ``"cuda"`` or ``"simulated"``.
        folder: the pool's own, for the rendezvous, output and stacks.
        port: a free one, for a test that leaves the default group and meets again under ``env://``.
        path: ``sys.path`` of the session.
        is_alone: the other ranks of the group are invented (see ``simulated/nccl.py``).
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
        """Holds what the current test has written to stdout and stderr, also from C++."""
        return self.folder / f"output-{self.rank}"

    @property
    def stacks(self) -> pathlib.Path:
        """Holds the stacks of all threads, after SIGUSR1."""
        return self.folder / f"stacks-{self.rank}"


@dataclass(frozen=True)
class Task:
    """One test: where its body is, the pickled keyword arguments, seconds it may take, and its warning filters."""

    module: str
    name: str
    arguments: bytes
    limit: float
    filters: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """How it went on one rank.

    Attributes:
        failure: ``None``, or the text to show.
        num_collectives: on the default group since it was made.
        reusable: whether the rank still has the default group that it started with.
    """

    failure: str | None = None
    num_collectives: int = 0
    reusable: bool = True


def serve(seat: Seat, pipe: multiprocessing.connection.Connection) -> None:
    """The life of a rank; the target of its process. Returns never."""
    # Ctrl-C reaches the whole foreground group; the session decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_session, daemon=True).start()
    stacks = seat.stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _redirect_output(seat.output)
    faulthandler.enable()
    sys.path[:] = seat.path
    try:
        _inside_pytest(lambda: _answer_until_closed(seat, pipe))
    except BaseException as error:  # whatever it is, the session must hear of it
        with contextlib.suppress(OSError):
            pipe.send(Answer(_traceback(error)))
    # Not sys.exit: destructors of torch may wait for ranks that are gone.
    os._exit(0)


def _end_with_the_session() -> None:
    """Ends this process when pytest is gone, however it went, also if the body hangs in a collective."""
    session = multiprocessing.parent_process()
    if session is not None:
        multiprocessing.connection.wait([session.sentinel])
        os._exit(1)


def _redirect_output(path: pathlib.Path) -> None:
    """Below Python: C++ writes to the descriptors. Appending, because the session cuts the file between tests."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    # Forked from a server, these two may belong to a closed file.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)


# ---- pytest's eyes --------------------------------------------------------------------------------------------------


def _inside_pytest(serve_tests: Callable[[], None]) -> None:
    """Calls the function where pytest would run a session: assertion rewriting is installed, and nothing else is."""

    class InsteadOfASession:
        @pytest.hookimpl(tryfirst=True)
        def pytest_cmdline_main(self, config: pytest.Config) -> int:
            pytest.register_assert_rewrite(*REWRITTEN)
            _explain_comparisons(config)
            os.environ.clear()
            os.environ.update(environment)
            serve_tests()
            return 0

    # The models of tests are so small that nothing of them would be sent as the parameters of real ones are.
    environment = {"MINIFSDP_TRANSPORT": "messages", **os.environ}
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments = ["-s", "-vv", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    pytest.main(arguments, plugins=[InsteadOfASession()])


def _explain_comparisons(config: pytest.Config) -> None:
    """Lets ``assert a == b`` show where they differ, as in the pytest process.

    pytest sets this up around each test item, and a rank has no items. The name is private to pytest; without it an
    assertion shows the two values and no difference.
    """
    from _pytest.assertion import util

    def explain(op: str, left: object, right: object) -> str | None:
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    util._reprcompare = explain


# ---- one test after the other ---------------------------------------------------------------------------------------


def _answer_until_closed(seat: Seat, pipe: multiprocessing.connection.Connection) -> None:
    _join_default_group(seat)
    group = dist.group.WORLD
    home = Surroundings()
    # What is imported stays. Frozen, it costs the collection after each test nothing: 200 ms become 1.
    gc.freeze()
    pipe.send(Answer())
    # A closed pipe means that the session has given this pool up.
    with contextlib.suppress(EOFError, ConnectionError):
        for number in itertools.count(1):
            task: Task = pipe.recv()
            home.prepare(task.limit)
            failure = _run(task)
            home.restore()
            pipe.send(Answer(failure, _num_collectives(), dist.group.WORLD is group))
            if number % 100 == 0:
                # What so many tests have left is what torch remembers.
                gc.freeze()


def _join_default_group(seat: Seat) -> None:
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
        # Else gloo asks for the address of the host's name, which a container or a laptop may not have.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if seat.kind == "cuda":
        device_here = _choose_gpu(seat)
        torch.cuda.set_device(device_here)
    else:
        # Each manual_seed() would write down where it was called, for the day when an accelerator comes: 6 ms.
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = _seed_nothing
    if seat.kind == "simulated":
        device_here = simulated.install()
    if seat.is_alone:
        store = simulated.INVENTED_STORE
        dist.init_process_group("simulated", rank=seat.rank, world_size=seat.num_ranks, store=store)
        return
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl", "simulated": "simulated"}[seat.kind],
        init_method=f"file://{seat.folder}/store",
        rank=seat.rank,
        world_size=seat.num_ranks,
        # NCCL makes its communicator now and not in the middle of the first test, and knows the device of a barrier.
        device_id=device_here if seat.kind == "cuda" else None,
    )


def _seed_nothing(seed: int) -> None:
    pass


def _choose_gpu(seat: Seat) -> torch.device:
    """One GPU for each rank if there are enough. Else all share the first."""
    if torch.cuda.device_count() >= seat.num_ranks:
        return torch.device("cuda", seat.rank)
    # NCCL refuses two ranks of one host on one GPU, so they say that they are on different hosts.
    os.environ.update(NCCL_HOSTID=f"rank{seat.rank}", NCCL_SOCKET_IFNAME="lo")
    return torch.device("cuda", 0)


def _num_collectives() -> int:
    # torch's own monitored barrier compares the same number; the type stubs do not know it.
    group: Any = dist.group.WORLD
    return group._get_sequence_number_for_group() if group is not None else 0


def _run(task: Task) -> str | None:
    """Runs one body; ``None`` if it went well, else what to show."""
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
        except BaseException as error:  # also SystemExit: a rank that leaves would take the pool along
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
    """``action:message:category:module``, as in ``filterwarnings`` of pytest; message and module are patterns."""
    action, message, category, module = [part.strip() for part in (text.split(":") + [""] * 3)[:4]]
    kind: Any = Warning
    if category:
        where, _, name = category.rpartition(".")
        kind = getattr(importlib.import_module(where) if where else builtins, name)
    warnings.filterwarnings(action, message, kind, module)  # type: ignore[arg-type]


_kept: dict[object, Any] = {}
_kept_groups: set[Any] = set()


def kept(key: object, make: Callable[[], T]) -> T:
    """What ``make`` returns, made by the first test that asks for it, with groups that stay for the tests after it.

    Most tests with several groups want the same ones. And DTensor works out for each operation on each mesh what is to
    be sent, which takes ten times as long as the operation, and must be forgotten with the groups. Every rank must ask.
    """
    if device_here.type == "sim":
        # Each test has a world of its own there.
        return make()
    if key not in _kept:
        before = set(c10d._world.pg_map)
        _kept[key] = make()
        _kept_groups.update(set(c10d._world.pg_map) - before)
    found: T = _kept[key]
    return found


def leftover_groups() -> list[Any]:
    """Groups that a test has made for itself."""
    return [group for group in c10d._world.pg_map if group is not dist.group.WORLD and group not in _kept_groups]


def _destroy_leftover_groups() -> None:
    leftover = leftover_groups()
    for group in leftover:
        dist.destroy_process_group(group)
    if leftover:
        forget_meshes()


def forget_meshes() -> None:
    """To be called when groups have gone.

    DTensor remembers results together with their mesh, and a mesh to come may equal one that is no more ("could not
    resolve the process group registered under the name ...").
    """
    debug._clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()


# torch 2.14 has made it public and warns about the older name.
_set_torch_time_limit: Callable[..., None] = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout


def _set_time_limit(limit: timedelta, group: Any) -> None:
    if device_here.type == "sim":
        group.set_timeout(limit)
    else:
        _set_torch_time_limit(limit, group)


class Surroundings:
    """What is the same before every test. Made once, when the rank has its default group."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.folder = pathlib.Path.cwd()
        self.limit = 0.0

    def prepare(self, limit: float) -> None:
        """Seeds, and the time-out of collectives on the default group; ``limit`` in seconds."""
        # At the end of the test before it was too early: another rank may still have been connecting to this one. That
        # a new test has come means that every rank has answered.
        _destroy_leftover_groups()
        torch.manual_seed(0)
        random.seed(0)
        # With NCCL a time-out ends the process and tells less than the stacks do: there, the limit alone counts.
        if device_here.type != "cuda" and limit != self.limit:
            _set_time_limit(timedelta(seconds=0.75 * limit), dist.group.WORLD)
            self.limit = limit
        if device_here.type == "sim":
            simulated.WORLD.begin()

    def restore(self) -> None:
        """Puts back what a body may have changed for the whole process."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        if torch.are_deterministic_algorithms_enabled():  # asked first, because the switch imports half of torch
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        gc.collect()
