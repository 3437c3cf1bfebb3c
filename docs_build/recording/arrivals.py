"""The arrival times of the data of collectives, for pictures: between the issue and the end of the wait.

A rank that issues a collective early and waits late cannot measure when its data arrived. A thread checks, ten times
per millisecond, all collectives that are issued and not complete yet::

    AG 2   issued 4.1 ms    there 6.3 ms    waited for 9.0 ms       2.7 ms early: no rank had to wait

A collective of gloo reports whether it is complete. A received message does not report this before the wait, even if it
is already in memory (`minifsdp_gloo` uses messages). So the thread checks the memory itself: before a receive is
issued, its last bytes are set to a `MARK` that no training writes. Data on a connection arrives in order, so all of it
has arrived when the mark is overwritten::

    issued    [  ?    ?    ?   mark]      on its way  [1.5  0.2   ?   mark]      there  [1.5  0.2  0.7  0.1]

This costs a few percent of the step; all runs with the same caption are recorded with it.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from minifsdp.checks.collective import Collective
from minifsdp.trace import Event, Recorder

KINDS = {"all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR"}
PAUSE = 1e-4
# The last bytes of a NaN, in float32 and in bfloat16, with a payload that no arithmetic produces.
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
            # The lambda also keeps the tensor alive. Only a unit frees its memory manually, and it waits first.
            self._marked.append(lambda end=end, num=num, _=tensor: ctypes.string_at(end, num) != MARK[-num:])
        return self._backend.recv(tensors, rank, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _Watch:
    """The collectives that are issued and not complete yet."""

    def __init__(self) -> None:
        # Memory may be freed after the wait, so the thread must not read it while a wait ends.
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


def _works(handle: Any) -> list[Any]:
    """Gloo's handles of one of the engine's handles."""
    while hasattr(handle, "_work"):
        handle = handle._work
    return list(getattr(handle, "_works", [handle]))


@contextmanager
def noted(recorder: Recorder) -> Iterator[None]:
    """Sets the arrival time of each event of a gloo collective in a ``with`` block."""
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
            # It arrived during the wait.
            event.arrived = event.end if event.arrived is None else min(event.arrived, event.end)
