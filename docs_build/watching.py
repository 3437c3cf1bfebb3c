"""Watches a training step for the step player: at each *moment*, what a rank holds, and which functions run.

A moment is the begin or the end of an event. What is noted of a unit is what holds right before it::

    state       S sharded, G gathering, U unsharded
    phase       what the unit's module is doing
    reduced     bytes of the gradients that the optimizer will see
    unsharded   bytes of whole gradients, from autograd's first until their reduce-scatter was waited for

The last is counted by weak references: a whole gradient is taken from autograd, packed and sent, and lies in the
memory of whoever does that, until nobody needs it any more.
"""

from __future__ import annotations

import linecache
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from docs_build.order import PACKAGE
from docs_build.source import read_module
from minifsdp import trace
from minifsdp.engine.cut import Cut

__all__ = ["Watcher", "pieces", "size"]

HOME = PACKAGE.as_posix() + "/"


class Watcher(trace.Recorder):
    """A recorder that also notes every moment."""

    def __init__(self, units: list[Any], optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.units, self.optimizer = units, optimizer
        self.gradients = [WholeGradients(unit.layout) for unit in units]
        self.moments: list[tuple[Any, ...]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows gradients meanwhile."""
        for one in self.gradients:
            one.follow()
        yield
        for one in self.gradients:
            one.leave()

    def begin(self, kind: str, unit: str, **facts: Any) -> trace.Event:
        """An event begins, and that is a moment."""
        event = super().begin(kind, unit, **facts)
        self.note(kind, unit, True, event.num_bytes, event.ranks)
        return event

    def finish(self, event: trace.Event | None) -> None:
        """It ends, another moment."""
        super().finish(event)
        if event is not None:
            self.note(event.kind, event.unit, False, event.num_bytes, event.ranks)

    def note(self, kind: str, unit: str, begins: bool, num_bytes: int = 0, ranks: tuple[int, ...] = ()) -> None:
        """One moment."""
        held = [_held(one, whole) for one, whole in zip(self.units, self.gradients, strict=True)]
        moments = sum(size(v) for s in self.optimizer.state.values() for v in s.values() if size(v) > 8)
        self.moments.append((kind, unit, begins, time.perf_counter(), num_bytes, ranks, _stack(), held, moments))


class WholeGradients:
    """The unsharded gradients of one unit that are in memory."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.seen: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def follow(self) -> None:
        """Looks at what is taken from autograd and what is packed."""
        layout = self.layout
        take, pack, keep = layout.take_gradient, layout.pack, layout.keep_unreduced

        def take_gradient(**options: Any) -> Any:
            gradient = take(**options)
            self.see(gradient.parts if gradient is not None else [])
            return gradient

        def packed(*arguments: Any) -> torch.Tensor:
            row: torch.Tensor = pack(*arguments)
            self.see([row])
            return row

        def keep_unreduced(gradient: Any) -> None:
            self.see(gradient.parts)
            keep(gradient)

        layout.take_gradient, layout.pack, layout.keep_unreduced = take_gradient, packed, keep_unreduced

    def leave(self) -> None:
        """The layout's own methods again."""
        for name in ("take_gradient", "pack", "keep_unreduced"):
            delattr(self.layout, name)

    def see(self, tensors: list[torch.Tensor]) -> None:
        """Counts these as long as they live."""
        self.seen.update({id(tensor): tensor for tensor in tensors})

    def num_bytes(self) -> int:
        """Of all that are alive, each memory once; without what is the optimizer's already."""
        leaves = getattr(self.layout, "_leaves", None) or [self.layout._now.leaf]
        alive = [*self.seen.values(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]
        reduced = {_memory(p.grad) for p in self.layout.local_parameters() if p.grad is not None}
        memories = {_memory(tensor): tensor for tensor in alive}
        return sum(size(tensor) for memory, tensor in memories.items() if memory not in reduced)


def _memory(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


def _held(unit: Any, whole: WholeGradients) -> tuple[str, str, int, int]:
    reduced = sum(size(p.grad) for p in unit.layout.local_parameters() if p.grad is not None)
    return unit.state.name[0], unit.phase.name, reduced, whole.num_bytes()


def size(value: Any) -> int:
    """Bytes of a tensor on this rank; 0 of anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    local = getattr(value, "_local_tensor", value)
    return int(local.numel() * local.element_size())


def pieces(unit: Any) -> list[tuple[float, float]]:
    """Which parts of a unit this rank stores: from where to where, as parts of its parameters laid end to end."""
    partition = getattr(unit.layout, "partition", None)
    if partition is not None:
        piece = partition.piece(unit.layout.mesh.shard_index)
        found = [(min(piece.start, partition.numel), min(piece.stop, partition.numel))]
        whole = partition.numel
    else:
        found, whole = [], 0
        for parameter in unit.layout.local_parameters():
            assert isinstance(parameter, DTensor)
            mesh = parameter.device_mesh
            cut, place = Cut(parameter.shape, 0, mesh.size(-1)), mesh.get_local_rank(mesh.ndim - 1)
            row = parameter.numel() // max(parameter.shape[0], 1)
            found.append((whole + cut.start(place) * row, whole + cut.start(place + 1) * row))
            whole += parameter.numel()
    return [(round(start / whole, 5), round(stop / whole, 5)) for start, stop in found if stop > start]


def _stack() -> list[tuple[str, str, str, str]]:
    """The functions of the package that are running, the innermost first: file, name, row of the page, and line.

    The line as text: its number would be another one after any edit above it.
    """
    found: list[tuple[str, str, str, str]] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 5:
        path = frame.f_code.co_filename
        if path.startswith(HOME) and not path.endswith("/trace.py"):
            name, line = path[len(HOME) :], linecache.getline(path, frame.f_lineno).strip()
            found.append((name, frame.f_code.co_qualname, read_module(name).anchor_of(frame.f_lineno), line))
        frame = frame.f_back  # type: ignore[assignment]
    return found
