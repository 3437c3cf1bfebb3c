"""Simulated streams that only log operations and waits, for code that uses an accelerator's streams.

They do not compute, and tensors stay on the CPU. Each line of the log is one operation::

    reduce waits for compute, all_reduce waits for reduce, compute waits for all_reduce, CPU waits for compute

The device is the second of its type, so code that does not pass the device would get a stream of the first one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.layout import Gradient

DEVICE = torch.device("cuda", 1)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.machine.log.append(f"CPU waits for an event of {self.stream.name}")


class Stream:
    def __init__(self, machine: StandIn, name: str) -> None:
        self.machine, self.name = machine, name

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        if event.stream is not self:
            self.machine.log.append(f"{self.name} waits for {event.stream.name}")

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.machine.log.append(f"CPU waits for {self.name}")


class StandIn:
    """Replaces the result of ``torch.get_device_module``.

    Attributes:
        log: the operations, in the order in which they were issued.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current = [Stream(self, "compute")]
        self._names = iter(["gather", "reduce", "all_reduce", "extra"])

    def Stream(self, *, device: torch.device, priority: int) -> Stream:
        assert device == DEVICE
        return Stream(self, next(self._names))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        assert device is not None, "whose stream?"
        return self._current[-1]

    def note(self, what: str) -> None:
        """Logs an operation on the current stream."""
        self.log.append(f"{self._current[-1].name}: {what}")

    def comm_streams(self) -> CommStreams:
        return CommStreams(DEVICE)


class Kept:
    """Replaces a layout. Stores the reduced gradients, and logs its operations."""

    name = "unit"
    offloads = has_gradient = has_hook = False

    def __init__(self, note: Callable[[str], None] = lambda what: None) -> None:
        self.note = note
        self.local_shards: list[torch.Tensor] = []

    @property
    def local_parameters(self) -> list[torch.Tensor]:
        """One parameter, with an earlier gradient or a hook of the user."""
        parameter = torch.zeros(1, requires_grad=True)
        if self.has_gradient:
            parameter.grad = torch.zeros(1)
        if self.has_hook:
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        return [parameter]

    def pack(self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False) -> torch.Tensor:
        return gradient.parts[0].to(dtype)

    def copy_to_host(self, local_shard: torch.Tensor) -> torch.Tensor:
        self.note("copy to the host")
        return local_shard.clone()

    def accept_gradient(self, gradient: Gradient, local_shard: torch.Tensor) -> None:
        self.note("accept")
        self.local_shards.append(local_shard.clone())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in that replaces the device module during the test."""
    made = StandIn()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made
