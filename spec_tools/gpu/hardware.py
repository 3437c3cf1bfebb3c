"""The devices that the command can use, and the stage ``hardware``: devices and versions of this machine."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from spec_tests.harness import device, simulated

CAUTIONS = {
    "cuda": "",
    "cpu": "Tried on the CPU, with gloo: nothing about a GPU is shown.",
    "simulated": "Tried on a simulated accelerator: nothing about a GPU is shown.",
}


def why_not_available(kind: str) -> str:
    """Why this machine cannot run on the device, as one sentence; empty if it can."""
    if kind == "simulated" and not simulated.is_available():
        return f"The simulated accelerator cannot be used with torch {torch.__version__}."
    if kind == "cuda" and not torch.cuda.is_available():
        return (
            f"There is no GPU here that torch {torch.__version__} can use ({_why_no_gpu()}); --device cpu needs none."
        )
    return ""


def _why_no_gpu() -> str:
    """Why ``torch.cuda.is_available()`` is False, for example because the driver is too old for this build of torch."""
    if torch.version.cuda is None:
        return "this build has no CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"CUDA {torch.version.cuda}: {str(error).splitlines()[0]}"
    return f"CUDA {torch.version.cuda} finds no device"


def num_devices(kind: str) -> int:
    """The number of ranks that can have a device of their own; 1 without GPUs."""
    return torch.cuda.device_count() if kind == "cuda" else 1


def work() -> Iterator[dict[str, Any]]:
    """Yields one finding. The process ends afterwards, so it does not keep memory of a GPU."""
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    devices = [{"name": f"device type {device().type}"}]
    if device().type == "cuda":
        nccl: Any = torch.cuda.nccl
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version())), "driver": _driver()}
        devices = [_gpu(index) for index in range(torch.cuda.device_count())]
    names = Counter(one["name"] for one in devices)
    words = [*(f"{number} x {name}" for name, number in names.items()), *map(" ".join, versions.items())]
    yield {"versions": versions, "devices": devices, "line": ", ".join(words)}


def _gpu(index: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(index)
    free, total = (round(memory / 2**30, 1) for memory in torch.cuda.mem_get_info(index))
    return {"name": facts.name, "capability": f"{facts.major}.{facts.minor}", "GiB": total, "free GiB": free}


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found[0] if found else "unknown"
