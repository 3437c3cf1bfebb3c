"""Collectives as NCCL runs them: on a stream, in one of two modes, and without stopping the CPU.

Since torch 2.8 the two modes differ in more than their result (pytorch PR 150398):

* ``async_op=False``: the kernel runs on the *current* stream, and the call returns ``None``. No wait is necessary:
  later operations on the stream run after it.
* ``async_op=True``: it runs on a stream of the group, which first waits for the current one. The call returns a
  ``Work``. Its ``wait()`` makes the stream that is current *at that time* wait, not the CPU. Until then the group keeps
  the tensors alive.

A `Wire` provides the other ranks' values:

* `GlooWire`: real ranks in other processes, connected by gloo. Training on the simulated device gives bitwise the same
  results as on the CPU.
* `FakePeers`: a single process in a group of any size. The values of the fake ranks are computed from this rank's
  values. They do not come from a real training, but they depend only on the inputs, which is sufficient for a replay
  in another order.

Like NCCL, it refuses CPU tensors and some dtypes. The collectives of one group run in the order of their issue: see
``issue_order.py``.

Spec: SIM-04.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.testing._internal.distributed.fake_pg import FakeStore

from spec_tests.harness.simulated.clocks import LOCK, Event, Stream
from spec_tests.harness.simulated.tensor import Launch, SimTensor, kernel, plain, unnoted
from spec_tests.harness.simulated.world import WORLD

__all__ = ["STORE_OF_ONE_PROCESS", "GlooWire", "FakePeers", "StoreOfOneProcess", "SimulatedNccl"]

Tensors = Sequence[torch.Tensor]

_communicators = itertools.count(1)

# The dtypes of `getNcclDataType` of torch. Without floats of 8 bits, whose sums need a new GPU.
_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = {*_FLOATS, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}


class Wire(Protocol):
    """Executes collectives on CPU memory."""

    def __call__(self, name: str, *arguments: Any) -> None:
        """Executes the method ``name`` of a process group, and returns when it is complete."""
        ...


class GlooWire:
    """The other ranks are processes, connected by gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.group = dist.ProcessGroup(store, rank, size)
        self.backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.group._set_default_backend(kind)
        self.group._register_backend(torch.device("cpu"), kind, self.backend)

    def __call__(self, name: str, *arguments: Any) -> None:
        options = arguments[-1] if arguments else None
        average = getattr(options, "reduceOp", None) == ReduceOp.AVG
        if average:
            # gloo has no AVG.
            options.reduceOp = ReduceOp.SUM
        try:
            method = getattr(self.group, name, None) or getattr(self.group, EARLIER[name])
            work = method(*arguments)
        finally:
            if average:
                options.reduceOp = ReduceOp.AVG
        if work is not None:
            work.wait()
        if average:
            for output in _flat(arguments[0]):
                output.div_(self.group.size())


class StoreOfOneProcess(dist.Store):
    """The store of a single process with fake peers: a wait returns at once, and no fake rank reports an error."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Stores a value."""
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        """The stored value, or empty bytes."""
        return self._values.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter. No call counts arrivals, because the fake ranks never arrive last."""
        count = int(self.get(key) or 0) + amount
        if not key.endswith("/arrived"):
            self.set(key, count)
        return count

    def wait(self, keys: Any, timeout: Any = None) -> None:
        """Returns at once."""

    def check(self, keys: Any) -> bool:
        """Whether all keys were set here or are the last key of a barrier, which the fake ranks have already passed."""
        return all(key in self._values or key.endswith("/complete") for key in keys)

    def delete_key(self, key: str) -> bool:
        """Deletes a value."""
        return self._values.pop(key, None) is not None

    # C++ calls this name.
    deleteKey = delete_key


# Kept permanently: torch keeps only its C++ part alive.
STORE_OF_ONE_PROCESS = StoreOfOneProcess()


class FakePeers:
    """Fake ranks: rank ``i`` has this rank's values times ``1 + (i - rank) / 8``. Integers are not changed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def _of(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        is_exact = values.is_floating_point() or values.is_complex()
        return values * (1 + (rank - self.rank) / 8) if is_exact else values

    def _sum(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        if operation in (ReduceOp.MAX, ReduceOp.MIN):
            return values.clone()
        total = self._of(values, 0).clone()
        for rank in range(1, self.size):
            total += self._of(values, rank)
        return total.div_(self.size) if operation == ReduceOp.AVG else total

    def __call__(self, name: str, *arguments: Any) -> None:
        execute = getattr(self, f"_{name.strip('_')}", None)
        if execute is not None:
            execute(*arguments)

    def _all_gather_single(self, output: torch.Tensor, piece: torch.Tensor, *_: Any) -> None:
        mine = piece.clone()
        for rank, row in enumerate(output.view(self.size, -1)):
            row.copy_(self._of(mine, rank).view(-1))

    def _allgather(self, outputs: Any, inputs: Any, *_: Any) -> None:
        for rank, output in enumerate(outputs[0]):
            output.copy_(self._of(inputs[0], rank))

    def _reduce_scatter_single(self, piece: torch.Tensor, whole: torch.Tensor, options: Any = None, *_: Any) -> None:
        operation = getattr(options, "reduceOp", ReduceOp.SUM)
        piece.view(-1).copy_(self._sum(whole.view(self.size, -1)[self.rank], operation))

    def _allreduce(self, values: Any, options: Any = None, *_: Any) -> None:
        operation = getattr(options, "reduceOp", ReduceOp.SUM)
        for value in values:
            value.copy_(self._sum(value, operation))


class SimulatedWork(dist._Work):
    """A collective on a stream of the group."""

    def __init__(
        self, group: SimulatedNccl, event: Event, index: int, kept: Tensors, result: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._group, self._event, self._index, self._result = group, event, index, result
        group.kept[self] = kept

    def wait(self, timeout: Any = None) -> bool:
        """Makes the current stream wait for the collective. The CPU does not wait."""
        WORLD.current_stream(self._index).wait_event(self._event)
        self._group.kept.pop(self, None)
        return True

    def block_current_stream(self) -> None:
        """Same as `wait`."""
        self.wait()

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the CPU's clock contains the collective."""
        return self._event.query()

    def is_success(self) -> bool:
        """Always true: errors are raised by the call itself."""
        return True

    def result(self) -> list[torch.Tensor]:
        """The outputs."""
        return self._result

    def get_future(self) -> Any:
        """A completed future: this call makes the current stream wait."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class _Backend:
    """The attributes that torch reads from a C++ backend."""

    supports_splitting = supports_time_estimate = supports_coalescing = False

    def __init__(self, options: Any, abort: Callable[[], None]) -> None:
        self.options, self.abort = options, abort


class SimulatedNccl(dist.ProcessGroup):
    """A process group whose collectives run on simulated streams.

    Args:
        store: the store of the rendezvous.
        rank, size: of this process in the group.
        wire: executes the collectives.
        timeout: after which a wait for a collective that cannot complete ends.

    Attributes:
        seconds: the time-out.
        peers_arrive: whether the other ranks arrive at collectives.
        is_aborted: whether `abort` was called.
        stream: on which asynchronous collectives run.
        communicators: the number of the communicator of each device.
        kept: tensors of asynchronous collectives that were not waited for.
        num_collectives: so far.
        has_threads: each collective, even a synchronous one, runs on a stream of its own and returns a ``Work``, as
            with gloo, which uses threads also for tensors of an accelerator.
    """

    has_threads = False

    def __init__(self, store: dist.Store, rank: int, size: int, wire: Wire, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self.wire, self._rank, self._size = store, wire, rank, size
        self.streams: dict[int, Stream] = {}
        self.kept: dict[SimulatedWork, Tensors] = {}
        self.communicators: dict[int, int] = {}
        self.num_collectives = 0
        self.seconds = timeout.total_seconds()
        self.peers_arrive, self.is_aborted = True, False
        self._name, self._description = "", ""

    def getBackendName(self) -> str:
        """The backend's name, for torch."""
        return "simulated"

    def __repr__(self) -> str:
        return f"<SimulatedNccl rank {self._rank} of {self._size}>"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("sim")]

    def _get_backend(self, device: Any) -> Any:
        return _Backend(self.wire.backend.options if isinstance(self.wire, GlooWire) else None, self.abort)

    @property
    def group_name(self) -> str:
        """The name that torch has set."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description that torch has set."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def name(self) -> str:
        """The backend's name, for torch."""
        return "simulated"

    def get_group_store(self) -> dist.Store:
        """The store of the rendezvous."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.num_collectives

    def _stream(self, index: int) -> Stream:
        if index not in self.streams:
            self.streams[index] = Stream(index, name=f"stream of the group of {self._size}")
        return self.streams[index]

    def _communicator(self, index: int) -> int:
        """The number of the communicator of a device."""
        return self.communicators.setdefault(index, next(_communicators))

    def _run(self, name: str, writes: Tensors, reads: Tensors, options: Any, arguments: tuple[Any, ...]) -> Any:
        """Executes a collective, and records it as a kernel of its stream."""
        if self.is_aborted:
            raise dist.DistBackendError(f"the communicator was aborted on rank {self._rank} (in {name})")
        for tensor in (*writes, *reads):
            if not isinstance(tensor, SimTensor):
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type} (in {name})")
            if not tensor.is_contiguous():
                raise ValueError(f"Tensors must be contiguous (in {name})")
            if tensor.dtype not in DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        self.num_collectives += 1
        index = writes[0]._index if writes else reads[0]._index if reads else 0  # type: ignore[attr-defined]
        is_asynchronous = self.has_threads or bool(getattr(options, "asyncOp", True))
        stream = current = WORLD.current_stream(index)
        if is_asynchronous:
            for work in [work for work in self.kept if work.is_completed()]:
                del self.kept[work]
            stream = Stream(index, name="thread of the backend") if self.has_threads else self._stream(index)
            stream.wait_stream(current)
        # Modes that count collectives intercept this call.
        if self.peers_arrive:
            with unnoted():
                self.wire(name, *_plain(arguments))
        with LOCK:
            launch = kernel(name.strip("_"), stream, list(reads), list(writes))  # type: ignore[arg-type]
        if not self.peers_arrive:
            self._leave_garbage(writes, launch)
        elif WORLD.log is not None:
            function = functools.partial(self.wire, name)
            WORLD.log.note(launch, name.strip("_"), function, arguments, {}, [], communicator=self._communicator(index))
        if not is_asynchronous:
            return None
        return SimulatedWork(self, stream.record_event(), index, (*writes, *reads), list(writes))

    def lose_peers(self) -> None:
        """For tests: another rank does not arrive at later collectives, so these cannot complete (``stuck.py``)."""
        self.peers_arrive = False

    def _leave_garbage(self, writes: Tensors, launch: Launch) -> None:
        stream, number, _, _ = launch
        WORLD.stuck.add(stream, number, self)
        for tensor in writes:
            assert isinstance(tensor, SimTensor)
            plain(tensor).view(-1).view(torch.uint8).fill_(255)
            block = tensor._home.block
            assert block is not None
            block.garbage += [
                one for one in block.accesses if one.is_write and (one.stream, one.number) == (stream, number)
            ]

    # --- the methods of a process group ---

    def all_gather_single(self, output: torch.Tensor, piece: torch.Tensor, opts: Any = None, **_: Any) -> Any:
        """See `dist.all_gather_single`."""
        options = opts or _default("AllgatherOptions")
        return self._run("all_gather_single", [output], [piece], options, (output, piece, options))

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, piece: torch.Tensor, whole: torch.Tensor, opts: Any = None, **_: Any) -> Any:
        """See `dist.reduce_scatter_single`."""
        options = opts or _default("ReduceScatterOptions")
        return self._run("reduce_scatter_single", [piece], [whole], options, (piece, whole, options))

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, values: Any, opts: Any = None, *_: Any, **__: Any) -> Any:
        """See `dist.all_reduce`."""
        values = [values] if isinstance(values, torch.Tensor) else list(values)
        options = opts if hasattr(opts, "reduceOp") else _default("AllreduceOptions")
        if opts is not None and options is not opts:
            options.reduceOp = opts
        return self._run("allreduce", values, values, options, (values, options))

    def allreduce_coalesced(self, values: Any, opts: Any = None, **_: Any) -> Any:
        """Several all-reduces at once."""
        work = None
        for value in values:
            work = self.allreduce([value], opts)
        return work

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """See `dist.all_gather`."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        options = opts or _default("AllgatherOptions")
        return self._run("allgather", _flat(outputs), inputs, options, (outputs, inputs, options))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """Several all-gathers at once."""
        work = None
        for output, piece in zip(outputs, inputs, strict=True):
            work = self.all_gather_single(output, piece, opts)
        return work

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """Several reduce-scatters at once."""
        work = None
        for piece, whole in zip(outputs, inputs, strict=True):
            work = self.reduce_scatter_single(piece, whole, opts)
        return work

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """See `dist.reduce_scatter`."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        options = opts or _default("ReduceScatterOptions")
        return self._run("reduce_scatter", outputs, _flat(inputs), options, (outputs, inputs, options))

    def broadcast(self, values: Any, opts: Any = None, *_: Any, **__: Any) -> Any:
        """See `dist.broadcast`."""
        if isinstance(values, torch.Tensor):
            values = [values]
        options = opts if hasattr(opts, "rootRank") else _default("BroadcastOptions")
        if options is not opts:
            options.rootRank = opts or 0
        return self._run("broadcast", list(values), list(values), options, (list(values), options))

    def reduce(self, values: Any, opts: Any = None, **_: Any) -> Any:
        """See `dist.reduce`."""
        options = opts or _default("ReduceOptions")
        return self._run("reduce", list(values), list(values), options, (list(values), options))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """See `dist.gather`."""
        options = opts or _default("GatherOptions")
        return self._run("gather", _flat(outputs), inputs, options, (outputs, inputs, options))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """See `dist.scatter`."""
        options = opts or _default("ScatterOptions")
        return self._run("scatter", outputs, _flat(inputs), options, (outputs, inputs, options))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        """See `dist.all_to_all`."""
        options = opts or _default("AllToAllOptions")
        return self._run("alltoall", outputs, inputs, options, (outputs, inputs, options))

    def alltoall_base(
        self, output: Any, whole: Any, output_sizes: Any, input_sizes: Any, opts: Any = None, **_: Any
    ) -> Any:
        """See `dist.all_to_all_single`."""
        options = opts or _default("AllToAllOptions")
        arguments = (output, whole, list(output_sizes or []), list(input_sizes or []), options)
        return self._run("alltoall_base", [output], [whole], options, arguments)

    all_to_all_single = alltoall_base

    def send(self, values: Any, target: int, tag: int = 0, **_: Any) -> Any:
        """See `dist.send`."""
        return self._run("send", [], values, None, (values, target, tag))

    def recv(self, values: Any, source: int, tag: int = 0, **_: Any) -> Any:
        """See `dist.recv`."""
        return self._run("recv", values, [], None, (values, source, tag))

    def barrier(self, opts: Any = None, **_: Any) -> Any:
        """Stops the CPU, as NCCL's does, until every rank has arrived and the device has completed all operations."""
        if self.is_aborted or not self.peers_arrive:
            raise dist.DistBackendError("a rank does not arrive at the barrier")
        self.num_collectives += 1
        self.wire("barrier", dist.BarrierOptions())
        WORLD.host_stops("barrier")
        WORLD.synchronize()
        stream = WORLD.current_stream(WORLD.current_index)
        is_asynchronous = bool(getattr(opts, "asyncOp", True))
        return SimulatedWork(self, stream.record_event(), stream.index, (), []) if is_asynchronous else None

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time-out, also that of gloo."""
        self.seconds = timeout.total_seconds()
        if isinstance(self.wire, GlooWire):
            self.wire.backend._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """Releases the kept tensors."""
        self.kept.clear()

    def abort(self) -> None:
        """Ends all collectives that cannot complete; later ones raise. Other threads may call it."""
        self.is_aborted = True
        self.kept.clear()
        WORLD.stuck.end(self)


# Names of torch before 2.13, by the names since then. A log has the latter with every version.
EARLIER = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}


def _default(name: str) -> Any:
    return getattr(torch._C._distributed_c10d, name)()


def _flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _flat(value)]


def _plain(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedNccl:
    """Called by ``init_process_group("simulated")`` and ``new_group``. A fake store selects fake peers."""
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    # For a Python store, the prefix store of a new group returns only a plain C++ `Store`.
    is_alone = isinstance(inner, (FakeStore, StoreOfOneProcess)) or type(inner) is dist.Store
    wire = FakePeers(rank, size) if is_alone else GlooWire(store, rank, size, timeout)
    return SimulatedNccl(store, rank, size, wire, timeout)
