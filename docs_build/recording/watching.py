"""Observes a training step for the step player: the memory of a rank and the running functions at each *moment*.

A moment is the start or the end of an event. For each unit, the state right before the moment is recorded::

    state       S sharded, G gathering, U unsharded
    phase       the phase of the unit's module
    reduced     bytes of the gradients that the optimizer uses
    unsharded   bytes of unsharded gradients, from autograd's first one until their reduce-scatter is complete

Unsharded gradients are counted with weak references: such a gradient is taken from autograd, packed and reduced, and
stays in memory until its last user releases it.
"""

import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from docs_build.reading.order import PACKAGE
from docs_build.reading.running import statement_at
from docs_build.reading.source import read_module
from minifsdp import trace
from minifsdp.engine.shards import shard_range

HOME = PACKAGE.as_posix() + "/"


class WatchedUnit:
    """An observed unit.

    Attributes:
        name, num_bytes: name of the unit, and the bytes of its unsharded parameters.
    """

    def __init__(self, unit: Any) -> None:
        self.unit, self.layout, self.name, self.num_bytes = unit, unit.layout, unit.name, unit.layout.num_bytes
        self._seen: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def held(self) -> tuple[str, str, int, int]:
        """State, phase, bytes of reduced gradients, bytes of unsharded gradients."""
        return self.unit.state.name[0], self.unit.phase.name, sum(map(size, self._reduced())), self.whole_bytes()

    def _reduced(self) -> list[Any]:
        """The gradients that the optimizer uses."""
        return [p.grad for p in self.layout.local_parameters if p.grad is not None]

    def shard_bytes(self) -> int:
        """The bytes of the unit that this rank stores."""
        return sum(map(size, self.layout.local_parameters))

    def see(self, tensors: list[torch.Tensor]) -> None:
        """Counts these tensors as unsharded gradients as long as they exist."""
        self._seen.update({id(tensor): tensor for tensor in tensors})

    def whole_bytes(self) -> int:
        """Bytes of all existing unsharded gradients. Shared memory counts once, gradients of the optimizer do not."""
        self.see([leaf.grad for leaf in self.layout.leaves if leaf.grad is not None])
        reduced = {_memory(gradient) for gradient in self._reduced()}
        memories = {_memory(tensor): tensor for tensor in self._seen.values()}
        return sum(size(tensor) for memory, tensor in memories.items() if memory not in reduced)

    def pieces(self) -> list[tuple[float, float]]:
        """The shard that this rank stores: start and stop as fractions of the unit's concatenated parameters."""
        sharding = getattr(self.layout, "sharding", None)
        if sharding is not None:
            held = sharding.shard_range(self.layout.mesh.shard_index)
            return _as_parts([(held.start, min(held.stop, sharding.numel))], sharding.numel)
        found, whole = [], 0
        for parameter in self.layout.local_parameters:
            mesh = parameter.device_mesh
            rows = shard_range(parameter.shape[0], mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1))
            per_row = parameter.numel() // max(parameter.shape[0], 1)
            found.append((whole + rows.start * per_row, whole + rows.stop * per_row))
            whole += parameter.numel()
        return _as_parts(found, whole)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Counts the gradients that are taken from autograd, and the buffers that they are packed into."""
        layout = self.layout
        take, pack, keep = layout.take_gradient, layout.pack, layout.keep_unreduced

        def take_gradient(**options: Any) -> Any:
            gradient = take(**options)
            self.see(gradient.parts if gradient is not None else [])
            return gradient

        def packed(*arguments: Any, **options: Any) -> torch.Tensor:
            row: torch.Tensor = pack(*arguments, **options)
            self.see([row])
            return row

        def keep_unreduced(gradient: Any) -> None:
            self.see(gradient.parts)
            keep(gradient)

        layout.take_gradient, layout.pack, layout.keep_unreduced = take_gradient, packed, keep_unreduced
        yield
        for name in ("take_gradient", "pack", "keep_unreduced"):
            delattr(layout, name)


class Watcher(trace.Recorder):
    """A recorder that also records every moment."""

    def __init__(self, units: Sequence[WatchedUnit], optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.units, self.optimizer = units, optimizer
        self.moments: list[tuple[Any, ...]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observes the gradients of all units in a ``with`` block."""
        with ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(unit.followed())
            yield

    def begin(self, kind: str, unit: str, **facts: Any) -> trace.Event:
        """Begins an event and records the moment."""
        event = super().begin(kind, unit, **facts)
        self.note(kind, unit, True, event.num_bytes, event.ranks)
        return event

    def finish(self, event: trace.Event | None) -> None:
        """Ends an event and records the moment."""
        super().finish(event)
        if event is not None:
            self.note(event.kind, event.unit, False, event.num_bytes, event.ranks)

    def note(self, kind: str, unit: str, begins: bool, num_bytes: int = 0, ranks: tuple[int, ...] = ()) -> None:
        """Records one moment."""
        held = [one.held() for one in self.units]
        moments = sum(size(v) for s in self.optimizer.state.values() for v in s.values() if size(v) > 8)
        self.moments.append((kind, unit, begins, time.perf_counter(), num_bytes, ranks, _stack(), held, moments))


def _memory(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())


def size(value: Any) -> int:
    """Bytes of a tensor on this rank; 0 for anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    local = getattr(value, "_local_tensor", value)
    return int(local.numel() * local.element_size())


def _as_parts(found: list[tuple[int, int]], whole: int) -> list[tuple[float, float]]:
    """Ranges of elements as fractions of all elements, without empty ranges."""
    return [(round(start / whole, 5), round(stop / whole, 5)) for start, stop in found if stop > start]


def _stack() -> list[tuple[str, str, str, str]]:
    """The running functions of the package, the innermost first: file, name, row of the page, and line.

    The line is text, because its number changes with every edit above it.
    """
    found: list[tuple[str, str, str, str]] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 5:
        path = frame.f_code.co_filename
        if path.startswith(HOME) and not path.endswith("/trace.py"):
            name = path[len(HOME) :]
            line = statement_at(name, frame.f_lineno)
            found.append((name, frame.f_code.co_qualname, read_module(name).anchor_of(frame.f_lineno), line))
        frame = frame.f_back  # type: ignore[assignment]
    return found
