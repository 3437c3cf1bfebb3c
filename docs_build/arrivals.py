"""When the data of a collective was there, for pictures: between its issue and the moment when it was waited for.

A rank that asks early and waits late cannot tell when its data came. A thread looks, ten times in a millisecond, at
what was issued and not found complete yet::

    AG 2   issued 4.1 ms    there 6.3 ms    waited for 9.0 ms       2.7 ms early: nobody had to wait

A collective of gloo says whether it is complete. A message that is received does not until it is waited for, though it
has long been in memory (`engine/gloo.py` sends by messages). So the memory itself is looked at: before a receive is
issued, its last bytes are set to a `MARK` that no training writes. What comes over a connection comes in order, so when
the mark has gone all is there::

    issued    [  ?    ?    ?   mark]      on its way  [1.5  0.2   ?   mark]      there  [1.5  0.2  0.7  0.1]

It costs a few percent of the step; runs with the same caption are all recorded with it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from minifsdp.engine.ledger import Collective
from minifsdp.trace import Event, Recorder

__all__ = ["noted"]

KINDS = {"all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR"}
PAUSE = 1e-4
# The end of a number that is none, in float32 and in bfloat16, with a payload that no arithmetic makes.
MARK = b"\x5a\xa5\xb5\x7f"

Arrived = Callable[[], bool]


class _Marking:
    """A backend of gloo that marks the memory of each message before it is received."""

    def __init__(self, backend: Any, marked: list[Arrived]) -> None:
        self._backend, self._marked = backend, marked

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        for tensor in tensors:
            num = min(len(MARK), tensor.nbytes)
            end = tensor.data_ptr() + tensor.nbytes - num
            ctypes.memmove(end, MARK[-num:], num)
            # It holds the tensor, too. Only a unit frees its own memory by hand, and not before it has waited.
            self._marked.append(lambda end=end, num=num, _=tensor: ctypes.string_at(end, num) != MARK[-num:])
        return self._backend.recv(tensors, rank, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _Watch:
    """What was issued and not found complete yet, by collective."""

    def __init__(self) -> None:
        # Memory may be given back when it was waited for; so nobody looks at it while a wait ends.
        self._lock = threading.Lock()
        self._waiting: dict[Collective, tuple[Event, list[Arrived]]] = {}

    def add(self, collective: Collective, event: Event, arrived: list[Arrived]) -> None:
        with self._lock:
            self._waiting[collective] = event, arrived

    def forget(self, collective: Collective) -> None:
        with self._lock:
            self._waiting.pop(collective, None)

    def look(self) -> None:
        with self._lock:
            for collective, (event, arrived) in list(self._waiting.items()):
                if all(has_arrived() for has_arrived in arrived):
                    event.arrived = time.perf_counter()
                    del self._waiting[collective]

    def look_until(self, is_over: threading.Event) -> None:
        while not is_over.is_set():
            self.look()
            time.sleep(PAUSE)


def _works(promise: Any) -> list[Any]:
    """Gloo's own promises behind one of the engine's."""
    while hasattr(promise, "_work"):
        promise = promise._work
    return list(getattr(promise, "_works", [promise]))


@contextmanager
def noted(recorder: Recorder) -> Iterator[None]:
    """Inside of it each event of a collective on gloo is told when its data arrived."""
    watch, is_over, marked = _Watch(), threading.Event(), list[Arrived]()
    issue, wait = Collective.__init__, Collective.wait

    def issue_and_note(self: Collective, kind: str, group: Any, *rest: Any, **options: Any) -> None:
        transport = group.transport
        if transport is not None and not isinstance(transport._backend, _Marking):
            stack.enter_context(mock.patch.object(transport, "_backend", _Marking(transport._backend, marked)))
        issue(self, kind, group, *rest, **options)
        events = [event for event in recorder.events[-3:] if event.kind == KINDS.get(kind)]
        if events:
            watch.add(self, events[-1], list(marked) or [work.is_completed for work in _works(self._work)])
        marked.clear()

    def forget_and_wait(self: Collective) -> None:
        watch.look()
        watch.forget(self)
        wait(self)

    thread = threading.Thread(target=watch.look_until, args=(is_over,), daemon=True)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Collective, "__init__", issue_and_note))
        stack.enter_context(mock.patch.object(Collective, "wait", forget_and_wait))
        thread.start()
        yield
        is_over.set()
        thread.join()
    for event in recorder.events:
        if event.kind in KINDS.values() and event.end > event.start:
            # It came while it was waited for.
            event.arrived = event.end if event.arrived is None else min(event.arrived, event.end)
