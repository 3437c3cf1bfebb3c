"""The devices that the command can use, and the stage ``hardware``: versions and start-up times."""

from __future__ import annotations

import itertools
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from spec_tests.harness import device, simulated
from spec_tools.gpu.code import ROOT
from spec_tools.gpu.tasks import on_ranks

START_LIMIT = 120.0

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


def work(what: str) -> dict[str, Any]:
    """The devices and versions, or how long something takes to start."""
    if what == "process":
        return {"start_up": _of_a_process()}
    begin = time.monotonic()
    if what == "devices":
        found: dict[str, Any] = on_ranks(1, devices, START_LIMIT)[0]
        return found | {"start_up": {"1 rank": round(time.monotonic() - begin, 2)}}
    on_ranks(int(what.split()[0]), nothing, START_LIMIT)
    return {"start_up": {what: round(time.monotonic() - begin, 2)}}


def nothing() -> None:
    """Does nothing: the ranks only start, each with a process, a context of the device, and a process group."""


def _of_a_process() -> dict[str, float]:
    """Seconds until Python runs, until it has imported torch and minifsdp, and until it has a context of the device."""
    context = "torch.zeros(1, device='cuda').cpu()" if device().type == "cuda" else ""
    steps = {"process": "", "import": "import torch, minifsdp", "context": context}
    program = "\n".join(f"{step}\nprint('{name}', time.time(), flush=True)" for name, step in steps.items())
    moments = {"begin": time.time()}
    command = [sys.executable, "-c", "import time\n" + program]
    for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        name, moment = line.split()
        moments[name] = float(moment)
    return {name: round(end - begin, 2) for (_, begin), (name, end) in itertools.pairwise(moments.items())}


def devices() -> dict[str, Any]:
    """On a rank, so that this process does not keep memory of a GPU: the devices and versions."""
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    found = [{"name": f"device type {device().type}"}]
    if device().type == "cuda":
        nccl: Any = torch.cuda.nccl
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version())), "driver": _driver()}
        found = [_gpu(index) for index in range(torch.cuda.device_count())]
    names = Counter(one["name"] for one in found)
    words = [*(f"{number} x {name}" for name, number in names.items()), *map(" ".join, versions.items())]
    return {"versions": versions, "devices": found, "line": ", ".join(words)}


def _gpu(index: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(index)
    free, total = (round(memory / 2**30, 1) for memory in torch.cuda.mem_get_info(index))
    return {"name": facts.name, "capability": f"{facts.major}.{facts.minor}", "GiB": total, "free GiB": free}


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found[0] if found else "unknown"
