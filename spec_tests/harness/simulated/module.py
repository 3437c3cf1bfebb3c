"""The module that ``torch.get_device_module("sim")`` returns: the functions of ``torch.cuda`` that are used.

Spec: SIM-01.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from spec_tests.harness.simulated.clocks import Event, Stream
from spec_tests.harness.simulated.world import NUM_DEVICES, WORLD

__all__ = ["DeviceModule"]


def _index(device: Any) -> int:
    if device is None:
        return WORLD.current_index
    if isinstance(device, int):
        return WORLD.current_index if device < 0 else device
    index = torch.device(device).index
    return WORLD.current_index if index is None else index


class DeviceModule:
    """The module of the simulated device."""

    Stream = Stream
    Event = Event

    # --- devices ---

    def device_count(self) -> int:
        """The number of simulated devices."""
        return NUM_DEVICES

    def current_device(self) -> int:
        """The device that is used if none is given."""
        return WORLD.current_index

    def set_device(self, device: Any) -> None:
        """Sets the current device of this thread."""
        WORLD.current_index = _index(device)

    def device(self, device: Any) -> Any:
        """Sets the current device of this thread for a ``with`` block."""
        return _OnDevice(_index(device))

    def is_available(self) -> bool:
        """Always true."""
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        return None

    def get_device_name(self, device: Any = None) -> str:
        """The same name for all devices."""
        return "simulated accelerator"

    # --- streams ---

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that kernels of the device are launched on."""
        return WORLD.current_stream(_index(device))

    def default_stream(self, device: Any = None) -> Stream:
        """The stream that is used if no other one was set."""
        return WORLD.main[_index(device)]

    def stream(self, stream: Stream | None) -> Any:
        """Sets the current stream of its device for a ``with`` block."""
        return _OnStream(stream)

    def set_stream(self, stream: Stream) -> None:
        """Sets the current stream of its device."""
        WORLD.use_stream(stream)

    # --- graphs ---

    class CUDAGraph:
        """A graph, which cannot be replayed."""

    def graph(self, graph: Any, *, capture_error_mode: str = "global") -> Any:
        """Captures a stream of its own in a ``with`` block (see ``capture.py``). The operators are executed at once."""
        return _Capturing(capture_error_mode)

    def exchange_capture_mode(self, mode: str) -> str:
        """Sets the mode of this thread towards captures, and returns the previous one."""
        return WORLD.captures.exchange_mode(mode)

    def _sleep(self, cycles: int) -> None:
        """Has no effect: an operation never counts as complete before the program waits for it."""

    def synchronize(self, device: Any = None) -> None:
        """Stops the CPU until the device has completed all operations."""
        WORLD.host_stops("device.synchronize")
        WORLD.synchronize()

    # --- memory ---

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes in use."""
        WORLD.memory.reap()
        return WORLD.memory.num_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        """The peak of the bytes in use or kept by ``record_stream``."""
        return WORLD.memory.peak

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Restarts the measurement of the peak."""
        WORLD.memory.reap()
        WORLD.memory.peak = WORLD.memory.used

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """The two numbers under the keys of CUDA's allocator."""
        memory = WORLD.memory
        names = ("allocated_bytes.all", "active_bytes.all", "reserved_bytes.all")
        stats = {f"{name}.current": memory.num_bytes for name in names}
        stats |= {f"{name}.peak": memory.peak for name in names}
        return {**stats, "num_alloc_retries": 0}

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free bytes and total bytes."""
        return 2**36 - WORLD.memory.num_bytes, 2**36

    def empty_cache(self) -> None:
        """Has no effect: there is no cache."""

    # --- random numbers: those of the CPU, so that both draw the same ---

    def manual_seed(self, seed: int) -> None:
        """Has no effect: the caller also seeds the CPU's generator."""

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """The seed of the CPU's generator."""
        return torch.initial_seed()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of the CPU's generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Sets the state of the CPU's generator."""
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The dtypes for autocast."""
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, *_: Any) -> bool:
        """True, as on a recent device."""
        return True

    def is_autocast_enabled(self) -> bool:
        """For autocast."""
        return torch.is_autocast_enabled("sim")


class _OnStream:
    """Sets a stream and its device as the current ones, like CUDA's context manager."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before: tuple[int, Stream] | None = None

    def __enter__(self) -> Stream | None:
        if self._stream is not None:
            self._before = WORLD.current_index, WORLD.current_stream(self._stream.index)
            WORLD.use_stream(self._stream)
            WORLD.current_index = self._stream.index
        return self._stream

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._before is not None:
            index, stream = self._before
            WORLD.use_stream(stream)
            WORLD.current_index = index


class _Capturing:
    def __init__(self, mode: str) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        WORLD.host_stops("the beginning of a capture")
        WORLD.synchronize()
        self._stream = _OnStream(Stream(name="capturing stream"))
        self._stream.__enter__()
        self._capture = WORLD.captures.begin(self._mode)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stream.__exit__()
        WORLD.captures.end(self._capture)


class _OnDevice:
    def __init__(self, index: int) -> None:
        self._index, self._before = index, 0

    def __enter__(self) -> None:
        self._before, WORLD.current_index = WORLD.current_index, self._index

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        WORLD.current_index = self._before
