"""Tensors of a simulated device: real CPU memory and real values under the name of another device.

A `SimTensor` is a CPU tensor that reports the device ``sim:0``. So autograd runs its backward on the thread of that
device. Every operator on it is dispatched to this module. The CPU's kernel executes it on the same memory (`run`), at
once and in program order, and it is recorded as an operation of the current stream. So the values are those of one
allowed order, and the *recorded* operations show whether there are other orders.

Like CUDA, the device refuses to compute with a CPU tensor, except a single number. A copy to or from pinned memory is
asynchronous on request:

==============================  =======================  ==================================================
copy                            ``non_blocking=False``   ``non_blocking=True``
==============================  =======================  ==================================================
device to pinned memory         the CPU waits            asynchronous; the CPU must not read before its end
device to other memory          the CPU waits            the CPU waits, too
pinned memory to device         the CPU waits            asynchronous; the CPU must not write before its end
other memory to device          the CPU waits            the source is read at once, the rest is asynchronous
==============================  =======================  ==================================================

``tensor.to("cpu", non_blocking=True)`` allocates its result in pinned memory, as torch does.

Spec: SIM-01, SIM-02, SIM-07.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spec_tests.harness.simulated.clocks import HOST, LOCK, Clock, Stream
from spec_tests.harness.simulated.memory import Access, Home
from spec_tests.harness.simulated.operators import Signature, signature_of
from spec_tests.harness.simulated.world import NUM_DEVICES, WORLD

Launch = tuple[int, int, Clock, str]
"""Stream, number, clock and lines of an operation."""
Stop = tuple[Stream, str]
"""A stream that the CPU waits for, and the reason."""

__all__ = ["Launch", "Recorder", "SimTensor", "kernel", "plain", "run", "settle", "unnoted", "wrap"]

CPU = torch.device("cpu")
DEVICES: list[torch.device] = []  # filled when "sim" is registered in torch


class SimTensor(torch.Tensor):
    """A tensor of a simulated device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _index: int
    _home: Home

    @property
    def device(self) -> torch.device:
        """``sim`` with an index."""
        return DEVICES[self._index]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _are_ours(types):
            # DTensor and other subclasses, which dispatch again for their inner tensors.
            return NotImplemented
        return run(func, args, kwargs or {})

    def record_stream(self, stream: Stream) -> None:
        """Keeps the memory from reuse until the stream has passed the point where it is freed."""
        block = self._home.block
        # The allocator does not know storages that are a part of another one.
        if block is not None and not self._home.is_part and stream.number != block.owner:
            block.recorded.add(stream.number)
            WORLD.memory.streams[stream.number] = stream

    def is_pinned(self, *_: Any) -> bool:
        """Memory of a device is never pinned."""
        return False

    def tolist(self) -> Any:
        """The values. The CPU waits for them."""
        return self.detach().cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Raises, as on CUDA: the values must be copied to the CPU first."""
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def __format__(self, specification: str) -> str:
        return format(self.item(), specification) if self.dim() == 0 else object.__format__(self, specification)

    def __repr__(self, *_: Any, **__: Any) -> str:
        inside = repr(plain(self.detach()))
        return f"{inside[:-1]}, device='{self.device}'{', requires_grad=True' if self.requires_grad else ''})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.clone()
            copy.requires_grad_(self.requires_grad)
            copy.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_index", "_home")})
            if self.grad is not None:
                copy.grad = self.grad.__deepcopy__(memo)
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = plain(self.detach())
        WORLD.stop_for(WORLD.current_stream(self._index), "saved")
        return rebuilt, (values, self.requires_grad, getattr(self, "_is_param", False))


def rebuilt(values: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Creates a tensor for ``torch.load``: on the device if its storage was loaded there, and otherwise on the CPU."""
    place = loaded.get(values.untyped_storage()._cdata)
    tensor = values if place is None else wrap(values, place[1])
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


loaded: dict[int, tuple[StorageWeakRef, int]] = {}
"""By address, the storages that ``torch.load`` must put on a device, and the device. While the weak reference exists,
no other storage gets the address."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the same memory."""
    inside = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if tensor.is_complex() and tensor.is_conj():
        return inside.conj()
    return torch._neg_view(inside) if tensor.is_neg() else inside


def wrap(inside: torch.Tensor, index: int) -> SimTensor:
    """A tensor of the device with the memory of a CPU tensor."""
    device = DEVICES[index]
    tensor: SimTensor = torch.Tensor._make_subclass(
        SimTensor, inside, False, dispatch_device=True, device_for_backend_keys=device
    )
    settle(tensor, index)
    return tensor


def settle(tensor: SimTensor, index: int) -> None:
    """Records the storage of the tensor. Called again when the tensor gets other memory."""
    before = tensor.__dict__.get("_home")
    tensor._index = index
    tensor._home = WORLD.memory.home_of(tensor.untyped_storage(), WORLD.current_stream(index), index)
    tensor._home.watch(tensor, WORLD.memory.released)
    if before is not None and before is not tensor._home:
        before.unwatch(tensor, WORLD.memory.released)


def host_home(tensor: torch.Tensor) -> Home:
    """The `Home` of CPU memory, which is watched from now on."""
    return WORLD.memory.home_of(tensor.untyped_storage(), None)


def is_watched(tensor: torch.Tensor) -> bool:
    """Whether this is CPU memory that takes part in asynchronous copies."""
    home = WORLD.memory.homes.get(tensor.untyped_storage()._cdata)
    return home is not None and home.block is not None and home.block.owner == HOST


class _Call:
    """One call of an operator, with its tensors by kind of access."""

    __slots__ = ("host_reads", "host_writes", "index", "outer", "reads", "signature", "writes")

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.reads: list[SimTensor] = []
        self.writes: list[SimTensor] = []
        self.host_reads: list[torch.Tensor] = []
        self.host_writes: list[torch.Tensor] = []
        self.outer: dict[int, tuple[torch.Tensor, SimTensor]] = {}
        self.index: int | None = None

    def enter(self, value: Any, is_written: bool) -> Any:
        """Records the tensors of an argument, and returns it with CPU tensors in place of device tensors."""
        if isinstance(value, torch.Tensor):
            if isinstance(value, SimTensor):
                (self.writes if is_written else self.reads).append(value)
                if self.index is not None and self.index != value._index and not self.signature.may_mix:
                    raise RuntimeError(
                        f"Expected all tensors to be on the same device, but found at least two devices, "
                        f"sim:{self.index} and sim:{value._index}! (in {self.signature.name})"
                    )
                self.index = value._index
                inside = plain(value)
                self.outer[id(inside)] = (inside, value)
                return inside
            (self.host_writes if is_written else self.host_reads).append(value)
            return value
        if isinstance(value, (list, tuple)):
            return [self.enter(item, is_written) for item in value]
        return value

    def refuse_mixture(self) -> None:
        """Raises if a device would compute with CPU memory."""
        if self.index is None or self.signature.may_mix:
            return
        if any(t.dim() for t in self.host_reads) or self.host_writes:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"sim:{self.index} and cpu! (in {self.signature.name})"
            )

    def reshape_written(self) -> None:
        """Updates tensors after ``resize_``, ``set_``, ``t_`` etc., which change the layout of a tensor of the user."""
        for inside, tensor in self.outer.values():
            if (
                inside.size() != tensor.size()
                or inside.stride() != tensor.stride()
                or inside.untyped_storage()._cdata != tensor.untyped_storage()._cdata
                or inside.storage_offset() != tensor.storage_offset()
            ):
                WORLD.memory.notice_size(inside.untyped_storage(), WORLD.current_stream(tensor._index))
                tensor.data = wrap(inside, tensor._index)

    def leave(self, result: Any, index: int | None, new: list[SimTensor]) -> Any:
        """The result on device ``index``, or on the CPU for ``None``. New tensors are appended to ``new``."""
        if isinstance(result, torch.Tensor):
            known = self.outer.get(id(result))
            if known is not None:
                return known[1]
            if index is None or isinstance(result, SimTensor):
                return result
            new.append(wrap(result, index))
            return new[-1]
        if isinstance(result, (list, tuple)):
            made = [self.leave(item, index, new) for item in result]
            return made if isinstance(result, list) else tuple(made)
        return result


def run(operator: Any, args: Any, kwargs: Any) -> Any:
    """Executes an operator with an argument or a result on a device."""
    if operator is _DEVICE:
        return args[0].device
    if operator.namespace == "_c10d_functional":
        # The kernel allocates its output and calls the process group, which gets the device tensors.
        with torch._C._ExcludeDispatchKeyGuard(_PYTHON):
            return operator(*args, **kwargs)
    signature = signature_of(operator)
    if signature.is_composite:
        made = operator.decompose(*args, **kwargs)
        return made if operator._schema.returns else None
    with LOCK:
        outside, stop = _executed(signature, operator, args, kwargs)
    # Without the lock, because other threads continue during the wait.
    if stop is not None:
        WORLD.stop_for(*stop)
    return outside


def _executed(signature: Signature, operator: Any, args: Any, kwargs: Any) -> tuple[Any, Stop | None]:
    """The result of an operator, and the stop of the CPU that it needs."""
    call = _Call(signature)
    writes = signature.writes
    inside = [call.enter(value, writes[position]) for position, value in enumerate(args)]
    by_name = {name: call.enter(value, name in signature.written_names) for name, value in kwargs.items()}
    target = call.index
    if by_name.get("device") is not None:
        device = torch.device(by_name["device"])
        by_name["device"] = CPU
        target = None if device.type == "cpu" else WORLD.current_index if device.index is None else device.index
        if target is not None and target >= NUM_DEVICES:
            raise RuntimeError(f"sim: invalid device ordinal {target}")
    if by_name.get("pin_memory"):
        by_name["pin_memory"] = False
    call.refuse_mixture()
    random_state = None
    if WORLD.log is not None and torch.Tag.nondeterministic_seeded in operator.tags:
        random_state = torch.get_rng_state()
    result = operator(*inside, **by_name)
    if call.writes:
        call.reshape_written()
    new: list[SimTensor] = []
    outside = call.leave(result, target, new)
    stop = None
    if signature.is_kernel:
        is_asynchronous = bool(kwargs.get("non_blocking")) or (
            -1 < signature.asynchronous_at < len(args) and bool(args[signature.asynchronous_at])
        )
        if signature.is_copy and (target is None or call.host_reads or call.host_writes):
            stop = _crossing(call, operator, args, kwargs, new, outside, is_asynchronous)
        elif call.index is not None or new:
            reads = call.reads if signature.reads else []
            index = call.index if call.index is not None else target
            assert index is not None
            launch = kernel(signature.name, WORLD.current_stream(index), reads, [*call.writes, *new])
            if WORLD.log is not None:
                WORLD.log.note(launch, signature.name, operator, args, kwargs, new, random_state)
            if signature.stops_host:
                stop = WORLD.current_stream(index), signature.name
            if call.host_reads:
                _host_access(call.host_reads, [], signature.name)
    return outside, stop


def _crossing(
    call: _Call, operator: Any, args: Any, kwargs: Any, new: list[SimTensor], outside: Any, is_asynchronous: bool
) -> Stop | None:
    """A copy between a device and the CPU. Returns the stop of the CPU that it needs."""
    name = f"{call.signature.name} between devices"
    to_host = bool(call.host_writes) or (not new and not call.writes)
    if to_host:
        (source,) = call.reads
        target = call.host_writes[0] if call.host_writes else outside
        stream = WORLD.current_stream(source._index)
        if is_asynchronous and not call.host_writes:
            host_home(target).block.is_pinned = True  # type: ignore[union-attr]
        on_its_own = is_asynchronous and _is_pinned(target)
        is_known = on_its_own or is_watched(target)
        launch = kernel(name, stream, [source], [], host_writes=[target] if is_known else [])
        if WORLD.log is not None:
            new_on_host = [target] if is_known and not call.host_writes else []
            WORLD.log.note(launch, name, operator, args, kwargs, new_on_host)
        return None if on_its_own else (stream, name)
    source_on_host = call.host_reads[-1]
    written = [*call.writes, *new]
    stream = WORLD.current_stream(written[0]._index)
    on_its_own = is_asynchronous and _is_pinned(source_on_host)
    if not on_its_own:
        _host_access([source_on_host], [], name)
    launch = kernel(name, stream, [], written, host_reads=[source_on_host] if on_its_own else [])
    if WORLD.log is not None:
        if not on_its_own:
            # The call has read the source: later writes to it must not change the replay.
            args = [value.clone() if value is source_on_host else value for value in args]
        WORLD.log.note(launch, name, operator, args, kwargs, new)
    return (stream, name) if not is_asynchronous and source_on_host.dim() else None


def _is_pinned(tensor: torch.Tensor) -> bool:
    if not is_watched(tensor):
        return False
    block = host_home(tensor).block
    return block is not None and block.is_pinned


def kernel(
    name: str,
    stream: Stream,
    reads: list[SimTensor],
    writes: list[SimTensor],
    *,
    host_reads: list[torch.Tensor] | tuple[()] = (),
    host_writes: list[torch.Tensor] | tuple[()] = (),
) -> Launch:
    """Records an operation of a stream with its accesses. The caller holds the lock."""
    number_of_stream, number, clock = WORLD.begin_operation(stream)
    where = WORLD.where()
    memory = WORLD.memory
    name = name.removeprefix("aten::")
    for tensors, is_write in ((reads, False), (writes, True)):
        for tensor in tensors:
            if tensor.numel():
                low, high = span(tensor)
                home = tensor._home
                access = Access(number_of_stream, number, low + home.offset, high + home.offset, is_write, name, where)
                memory.access(home, access, clock)
    for hosts, is_write in ((host_reads, False), (host_writes, True)):
        for host in hosts:
            if host.numel():
                low, high = span(host)
                home = host_home(host)
                access = Access(number_of_stream, number, low + home.offset, high + home.offset, is_write, name, where)
                memory.access(home, access, clock)
    return number_of_stream, number, clock, where


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of bytes that a tensor covers, from the beginning of its storage."""
    size = tensor.element_size()
    low = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return low, low + tensor.numel() * size
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (reach + 1) * size


def _host_access(reads: list[torch.Tensor], writes: list[torch.Tensor], name: str) -> Launch | None:
    """Records an access of the CPU, if a device also uses the memory."""
    if not WORLD.memory.num_host_blocks:
        return None
    given = [(tensor, False) for tensor in reads] + [(tensor, True) for tensor in writes]
    watched = [(tensor, is_write) for tensor, is_write in given if tensor.numel() and is_watched(tensor)]
    if not watched:
        return None
    _, number, clock = WORLD.begin_operation(None)
    where = WORLD.where()
    for tensor, is_write in watched:
        low, high = span(tensor)
        home = host_home(tensor)
        access = Access(HOST, number, low + home.offset, high + home.offset, is_write, name, where)
        WORLD.memory.access(home, access, clock)
    return HOST, number, clock, where


def on_the_cpu(operator: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator without a device tensor. Records it if it accesses memory that a device copies from or to."""
    if not WORLD.memory.num_host_blocks or getattr(_in_a_kernel, "is_so", False):
        return operator(*args, **kwargs)
    random_state = torch.get_rng_state() if WORLD.log is not None else None
    result = operator(*args, **kwargs)
    signature = signature_of(operator)
    if not signature.is_kernel:
        return result
    with LOCK:
        _note_on_the_cpu(signature, operator, args, kwargs, result, random_state)
    return result


def _note_on_the_cpu(
    signature: Signature, operator: Any, args: Any, kwargs: Any, result: Any, random_state: torch.Tensor | None
) -> None:
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    given = [*zip(args, signature.writes, strict=False)]
    given += [(value, name in signature.written_names) for name, value in kwargs.items()]
    for value, is_written in given:
        (writes if is_written else reads).extend(_tensors_in(value))
    name = signature.name.removeprefix("aten::")
    launch = _host_access(reads if signature.reads else [], writes, name)
    if launch is not None and WORLD.log is not None:
        known = {id(tensor) for tensor in writes}
        made = [tensor for tensor in _tensors_in(result) if id(tensor) not in known]
        for tensor in made:
            # Computed from watched memory, so the replay computes it again.
            pinned(tensor, is_pinned=False)
        WORLD.log.note(launch, name, operator, args, kwargs, made, random_state)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in pytree.tree_leaves(value) if isinstance(tensor, torch.Tensor)]


_DEVICE = torch.ops.prim.device.default
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).add(torch._C.DispatchKey.PythonTLSSnapshot)


_in_a_kernel = threading.local()


@contextmanager
def unnoted() -> Iterator[None]:
    """Turns recording off for CPU work that stands for work of the device."""
    _in_a_kernel.is_so = True
    try:
        yield
    finally:
        _in_a_kernel.is_so = False


OURS = (torch.Tensor, torch.nn.Parameter, SimTensor)
_FAKE = torch._C._TorchDispatchModeKey.FAKE


class Recorder(TorchDispatchMode):
    """Records operators without a device tensor among their arguments: factories, and CPU work on host memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch calls this for each operator; nothing is compiled here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], SimTensor):
            return args[0].device
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            # Only shapes are computed.
            return func(*args, **kwargs)
        if not _are_ours(types):
            # DTensor and other subclasses: they dispatch again for their inner tensors.
            return NotImplemented
        device = kwargs.get("device")
        if SimTensor in types or (device is not None and torch.device(device).type == "sim"):
            return run(func, args, kwargs)
        if func is torch.ops.aten._pin_memory.default:
            return pinned_copy(args[0])
        if func is torch.ops.aten.is_pinned.default:
            return _is_pinned(args[0])
        if kwargs.get("pin_memory"):
            return pinned(func(*args, **{**kwargs, "pin_memory": False}))
        if _has_device_tensor(args):
            return run(func, args, kwargs)
        return on_the_cpu(func, args, kwargs)


def _are_ours(types: Any) -> bool:
    return all(kind in OURS for kind in types)


def _has_device_tensor(args: Any) -> bool:
    return any(
        isinstance(a, SimTensor) or (isinstance(a, (list, tuple)) and any(isinstance(x, SimTensor) for x in a))
        for a in args
    )


def pinned(tensor: torch.Tensor, *, is_pinned: bool = True) -> torch.Tensor:
    """Watches CPU memory from now on; by default as pinned memory."""
    if tensor.untyped_storage().nbytes():
        home = host_home(tensor)
        home.block.is_pinned |= is_pinned  # type: ignore[union-attr]
        home.watch(tensor, WORLD.memory.released)
    return tensor


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Implements ``pin_memory()``."""
    return tensor if _is_pinned(tensor) else pinned(tensor.clone())
