"""The streams of a backward: each node runs on the stream of its forward, as autograd does on a GPU.

Autograd stores in each node the stream that was current when the node was created. For a device written in Python it
always stores the default stream. This module finds the stream that a GPU would have stored. Nodes have increasing
numbers in each thread, and the module keeps the number at which the current stream has changed::

    forward on the compute stream     nodes 0 to 3
    with stream(side):                nodes 4 to 9        4: side
    forward on the compute stream     nodes 10 to 12      10: compute stream

A `Backward` follows one call of autograd's engine if some node, or the caller, has another stream than the default one.
It does what the engine does on a GPU:

1. While a node runs, with its hooks, its stream is current.
2. When it has run, the streams of the nodes that get its gradients wait for its stream. The memory of a gradient is
   kept for these streams (``record_stream``).
3. At the end, the stream of the caller waits for the streams of the nodes without a successor, which write gradients of
   parameters. The engine's callbacks run on the caller's stream.

The node of a parameter, which accumulates its gradient, has the stream of the first node that has used the parameter.
All this holds for ``sim:0`` only. Not modelled: a sum of two gradients of different streams (it runs on the stream of
the later one), and a graph that another thread has created.

*In torch:* ``engine.cpp`` and ``input_buffer.cpp``.

Spec: SIM-17.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from spec_tests.harness.simulated.clocks import Stream

__all__ = ["Backward", "Backwards"]

ACCUMULATES = 2**64 - 1
"""The number of all nodes that accumulate a gradient."""


class Backwards:
    """The streams of the nodes that each thread has created, and the calls of the engine that are followed.

    Args:
        default: the default stream.
    """

    def __init__(self, default: Stream) -> None:
        self._default = default
        self._local = threading.local()
        self._running: list[Backward] = []

    def begin(self) -> None:
        """Called at the beginning of a test: all nodes of this thread have the default stream from now on."""
        self._local.__dict__.clear()
        self._running.clear()

    # --- forward ---

    def _changes(self) -> tuple[list[int], list[Stream]]:
        """The numbers at which the stream of this thread has changed, and the streams from there on."""
        local = self._local.__dict__
        return local.setdefault("numbers", []), local.setdefault("streams", [])

    def changed(self, stream: Stream) -> None:
        """Called when ``stream`` becomes the current one of this thread."""
        numbers, streams = self._changes()
        number = torch.autograd._get_sequence_nr()
        if numbers and numbers[-1] == number:
            numbers.pop()
            streams.pop()
        if (streams[-1] if streams else self._default) != stream:
            numbers.append(number)
            streams.append(stream)

    def stream_of(self, node: Any) -> Stream:
        """The stream on which this thread has created a node that accumulates no gradient."""
        numbers, streams = self._changes()
        place = bisect.bisect_right(numbers, node._sequence_nr()) - 1
        return self._default if place < 0 else streams[place]

    # --- backward ---

    @contextmanager
    def followed(self, roots: Iterable[Any], caller: Stream) -> Iterator[None]:
        """Follows one call of the engine, if a stream other than the default one takes part."""
        if not self._running and not self._changes()[1] and caller == self._default:
            yield
            return
        # A hook of a node can call the engine again, inside a stream context of its own.
        outer = self._local.__dict__.get("place")
        backward = Backward(self, [*roots], caller)
        self._running.append(backward)
        try:
            yield
        finally:
            backward.end()
            self._running.remove(backward)
            self._local.place = outer

    def place(self) -> Place | None:
        """Where this thread is in a backward that is followed; ``None`` outside of it."""
        if not self._running or torch._C._current_graph_task_id() == -1:
            return None
        found: Place | None = self._local.__dict__.get("place")
        backward, node = self._running[-1], torch._C._current_autograd_node()
        if found is None or found.backward is not backward or found.node is not node:
            found = self._local.place = Place(backward, node, backward.enter(node))
            self.changed(found.stream)
        return found


class Place:
    """A node that a thread runs.

    Attributes:
        backward, node: the node; another one after the last node.
        stream: the current stream, at first that of the node.
    """

    def __init__(self, backward: Backward, node: Any, stream: Stream) -> None:
        self.backward, self.node, self.stream = backward, node, stream


class StreamOf(Protocol):
    """Finds the streams of nodes."""

    def stream_of(self, node: Any) -> Stream:
        """The stream of a node that accumulates no gradient."""
        ...

    def place(self) -> Place | None:
        """Called when a node begins."""
        ...


class Backward:
    """One call of the engine.

    Args:
        streams: the streams of the nodes.
        roots: tensors or gradient edges that it begins with.
        caller: the current stream of the caller.
    """

    def __init__(self, streams: StreamOf, roots: Sequence[Any], caller: Stream) -> None:
        self._caller, self._streams = caller, dict[Any, Stream]()
        self._last: Any = None
        self._leaves: set[Stream] = set()
        begin = [node for root in roots if (node := getattr(root, "grad_fn", None) or getattr(root, "node", None))]
        for node in sorted(_nodes(begin), key=lambda node: node._sequence_nr()):
            self._streams[node] = found = self._choose(node, streams)
            for following, _ in node.next_functions:
                if following is not None and following._sequence_nr() == ACCUMULATES:
                    self._streams.setdefault(following, found)
        # The hooks make each node known, also one that launches nothing.
        self._hooks = [node.register_prehook(lambda gradients: _begin(streams, gradients)) for node in self._streams]
        for node in begin:
            if self._streams[node] != caller:
                self._streams[node].learn(caller.clock)

    def _choose(self, node: Any, streams: StreamOf) -> Stream:
        if node in self._streams:
            return self._streams[node]
        if all(metadata.device.type == "cpu" for metadata in node._input_metadata):
            # It runs on the thread of the caller.
            return self._caller
        return streams.stream_of(node) if node._sequence_nr() != ACCUMULATES else self._caller

    def enter(self, node: Any) -> Stream:
        """1. Called when a node begins, or a callback after the last one. Returns its stream."""
        self._leave()
        if node not in self._streams:
            self._join()
            return self._caller
        self._last = node
        return self._streams[node]

    def _leave(self) -> None:
        """2. The last node has ended."""
        node, self._last = self._last, None
        if node is None:
            return
        stream = self._streams.pop(node)
        following = [self._streams[other] for other, _ in node.next_functions if other in self._streams]
        for other in following:
            if other != stream:
                other.learn(stream.clock)
        if not following:
            self._leaves.add(stream)

    def _join(self) -> None:
        """3. The caller waits."""
        for stream in self._leaves - {self._caller}:
            self._caller.learn(stream.clock)
        self._leaves.clear()

    def end(self) -> None:
        """Called when the engine has returned."""
        self._leave()
        self._join()
        for hook in self._hooks:
            hook.remove()


def _begin(streams: StreamOf, gradients: Sequence[Any]) -> None:
    place = streams.place()
    for gradient in gradients:
        if place is not None and gradient is not None and gradient.device.type != "cpu":
            # A gradient of another stream must not be reused before this node has read it.
            gradient.record_stream(place.stream)


def _nodes(begin: Sequence[Any]) -> list[Any]:
    found = dict.fromkeys(begin)
    waiting = [*found]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                waiting.append(node)
    return [*found]
