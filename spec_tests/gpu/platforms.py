"""What the kit runs on: a kind of device, its collectives, and how one of its streams is kept busy.

The kit was written without a GPU. What can differ between a GPU and what its author had is gathered here, so that all
other lines of it are tried on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spec_tests.harness import simulated

__all__ = ["NotHere", "Platform", "find"]

# `_sleep` counts cycles of the GPU's clock, which runs at 1 to 2 GHz. A delay need not be exact.
CYCLES_PER_MILLISECOND = 1_500_000


class NotHere(Exception):
    """The platform cannot be used on this machine; the message is one sentence for the user."""


@dataclass(frozen=True)
class Platform:
    """What the kit runs on.

    Attributes:
        name: what ``--device`` takes, of the kit and of pytest.
        device_type: torch's word for the device.
        collectives: the backend of ``torch.distributed`` that carries the collectives.
        caution: what a report must say first; empty on a GPU.
    """

    name: str
    device_type: str
    collectives: str
    caution: str = ""

    def num_devices(self) -> int:
        """How many ranks can have a device of their own."""
        return int(self._module().device_count())

    def world_sizes(self) -> list[int]:
        """2, and 4 and 8 where there are as many devices. Two ranks share one device if there is only one."""
        return [2, *(size for size in (4, 8) if size <= self.num_devices())]

    def sleep(self, milliseconds: float) -> None:
        """Keeps the current stream busy, without stopping the CPU. Only a real stream can be: nothing elsewhere."""
        if self.device_type == "cuda":
            self._module()._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))

    def current_stream(self) -> Any:
        """Where operators go."""
        return self._module().current_stream()

    def synchronize(self) -> None:
        """Waits for all streams of this rank's device."""
        self._module().synchronize()

    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)


CUDA = Platform("cuda", "cuda", "nccl")
CPU = Platform("cpu", "cpu", "gloo", "Tried on the CPU, with gloo: nothing about a GPU is shown.")
SIMULATED = Platform("simulated", "sim", "simulated", "Tried on a simulated accelerator: nothing about a GPU is shown.")
PLATFORMS = {platform.name: platform for platform in (CUDA, CPU, SIMULATED)}


def find(name: str) -> Platform:
    """The platform of this name.

    Raises:
        NotHere: this machine has not got what it needs.
    """
    platform = PLATFORMS[name]
    if platform is CUDA and not torch.cuda.is_available():
        raise NotHere(
            f"There is no GPU here that torch {torch.__version__} can use, so there is nothing to run; "
            "--device cpu tries the kit itself."
        )
    if platform is SIMULATED:
        _start_simulation()
    return platform


def _start_simulation() -> None:
    if not simulated.is_available():
        raise NotHere(f"The simulated accelerator cannot be used with torch {torch.__version__}.")
    simulated.install()
