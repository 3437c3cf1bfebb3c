"""The platforms of the kit: a device type, its collectives, and how to keep one of its streams busy.

The kit was written without a GPU. All code that differs between a GPU and a CPU is in this file, so that the rest of
the kit can be tested on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_tests.harness import simulated
from spec_tools.gpu.intervals import Interval, of_kernels

__all__ = ["NotHere", "Platform", "find"]

# `_sleep` counts cycles of the GPU's clock, which runs at 1 to 2 GHz. A delay need not be exact.
CYCLES_PER_MILLISECOND = 1_500_000

# Functions of CUDA's runtime by what they do: stop the host, take memory from the device, start a kernel or a copy.
RUNTIME_CALLS = {
    "syncs": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    "mallocs": ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"),
    "launches": (
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
    ),
}


class NotHere(Exception):
    """The platform cannot be used on this machine; the message is one sentence for the user."""


@dataclass(frozen=True)
class Platform:
    """A platform that the kit can run on.

    Attributes:
        name: value of ``--device``, for the kit and for pytest.
        device_type: torch's name of the device type.
        collectives: the backend of ``torch.distributed``.
        caution: a warning at the beginning of the report; empty on a GPU.
        sizes: models of the stage ``steps``, the smallest first.
        largest: bytes of the largest tensor of the stage ``bandwidth``.
    """

    name: str
    device_type: str
    collectives: str
    caution: str = ""
    sizes: Sequence[str] = ("tiny",)
    largest: int = 1 << 22

    def num_devices(self) -> int:
        """The number of ranks that can have a device of their own."""
        return int(self._module().device_count())

    def world_sizes(self) -> list[int]:
        """2, and 4 and 8 if there are enough devices. If there is only one device, two ranks share it."""
        return [2, *(size for size in (4, 8) if size <= self.num_devices())]

    def sleep(self, milliseconds: float) -> None:
        """Keeps the current stream busy, without stopping the CPU. Does nothing on a platform without streams."""
        if self.device_type == "cuda":
            self._module()._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))

    def current_stream(self) -> Any:
        """The stream that operators are launched on."""
        return self._module().current_stream()

    def synchronize(self) -> None:
        """Waits for all streams of this rank's device."""
        self._module().synchronize()

    def empty_cache(self) -> None:
        """Returns unused memory to the device, so that the next measurement starts without it."""
        if self.device_type == "cuda":
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Bytes in live tensors; starts a new measurement of `peak_memory`. Zero on other devices."""
        if self.device_type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())

    def peak_memory(self, before: int) -> dict[str, float]:
        """``peak GiB`` in tensors since `allocated`, without the ``before`` bytes; empty on other devices."""
        if self.device_type != "cuda":
            return {}
        return {"peak GiB": round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)}

    def profiled(self, function: Callable[[], Any]) -> tuple[dict[str, int], list[Interval]]:
        """Calls ``function`` under the profiler.

        Returns:
            The number of its calls of CUDA's runtime (``RUNTIME_CALLS``), and its kernels. Both are empty on other
            devices.
        """
        if self.device_type != "cuda":
            function()
            return {}, []
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        # At its end, the profiler synchronizes the device, so all kernels have run.
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            function()
        events = profile.events()
        names = [event.name for event in events]
        calls = {what: sum(name in group for name in names) for what, group in RUNTIME_CALLS.items()}
        return calls, of_kernels(events)

    def mark(self) -> Any:
        """This moment on the current stream; on a platform without streams, on the host."""
        if self.device_type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        """The time between two marks. Waits for the second."""
        if self.device_type != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def free_memory(self) -> int:
        """Free bytes of this rank's device; on other platforms than a GPU, of the machine."""
        if self.device_type == "cuda":
            return int(torch.cuda.mem_get_info()[0])
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))

    def card(self) -> tuple[str, str]:
        """The name of this rank's device, and a text that differs between devices."""
        if self.device_type != "cuda":
            return f"device type {self.device_type}", self.device_type
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return str(properties.name), str(properties.uuid)

    def device_name(self, device: torch.device) -> str:
        """The name of a device."""
        if self.device_type != "cuda":
            return f"device type {self.device_type}"
        return torch.cuda.get_device_name(device)

    def libraries(self) -> str:
        """The versions of NCCL and CUDA, or the name of the backend."""
        if self.device_type != "cuda":
            return self.collectives
        nccl: Any = torch.cuda.nccl
        return f"NCCL {'.'.join(map(str, nccl.version()))}, CUDA {torch.version.cuda}"

    def memory(self, device: torch.device) -> dict[str, float]:
        """Free and total GiB of a device; empty on other platforms. This uses memory of the device for a context."""
        if self.device_type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(device)
        return {"free GiB": round(free / 2**30, 1), "GiB": round(total / 2**30, 1)}

    def peer_access(self) -> list[list[bool]]:
        """Whether the GPU of the row can access the memory of the GPU of the column; empty on other platforms."""
        if self.device_type != "cuda":
            return []
        numbers = range(self.num_devices())
        return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in numbers] for i in numbers]

    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)


CUDA = Platform("cuda", "cuda", "nccl", sizes=("125M", "350M", "1.3B"), largest=1 << 30)
CPU = Platform("cpu", "cpu", "gloo", "Tried on the CPU, with gloo: nothing about a GPU is shown.")
SIMULATED = Platform("simulated", "sim", "simulated", "Tried on a simulated accelerator: nothing about a GPU is shown.")
PLATFORMS = {platform.name: platform for platform in (CUDA, CPU, SIMULATED)}


def find(name: str) -> Platform:
    """The platform of this name.

    Raises:
        NotHere: this machine does not have what the platform needs.
    """
    platform = PLATFORMS[name]
    if platform is CUDA and not torch.cuda.is_available():
        raise NotHere(
            f"There is no GPU here that torch {torch.__version__} can use ({why_no_gpu()}), so there is nothing to "
            "run; --device cpu tries the kit itself."
        )
    if platform is SIMULATED:
        _start_simulation()
    return platform


def why_no_gpu() -> str:
    """Why ``torch.cuda.is_available()`` is False, for example because the driver is too old for this build of torch."""
    if torch.version.cuda is None:
        return "this build has no CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"CUDA {torch.version.cuda}: {str(error).partition(chr(10))[0]}"
    return f"CUDA {torch.version.cuda} finds no device"


def _start_simulation() -> None:
    if not simulated.is_available():
        raise NotHere(f"The simulated accelerator cannot be used with torch {torch.__version__}.")
    simulated.install()
