"""The hardware and software of this machine: processors, devices, and versions of the software stack."""

from __future__ import annotations

import os
import platform as python_platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from spec_tools.gpu.platforms import CUDA, Platform

__all__ = ["work"]


def work(platform: Platform) -> Iterator[dict[str, Any]]:
    """Yields one finding with all facts."""
    yield {
        "outcome": "passed",
        "versions": {"Python": python_platform.python_version(), "torch": torch.__version__} | _versions(platform),
        "devices": _gpus() if platform is CUDA else [{"name": f"device type {platform.device_type}"}],
        "processors": os.cpu_count(),
        "system": f"{python_platform.system()} {python_platform.release()}",
    }


def _versions(platform: Platform) -> dict[str, str]:
    if platform is not CUDA:
        return {}
    nccl: Any = torch.cuda.nccl
    return {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version())), "driver": _driver()}


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown, there is no nvidia-smi"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return next(iter(done.stdout.split()), f"unknown, nvidia-smi ended with {done.returncode}")


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        memory = {"GiB": round(total / 2**30, 1), "free GiB": round(free / 2**30, 1)}
        found.append({"name": name, "capability": f"{major}.{minor}", **memory})
    return found
