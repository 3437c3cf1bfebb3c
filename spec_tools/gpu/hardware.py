"""The first stage: versions, one line for each rank, and facts of this machine with warnings.

It yields three findings, in this order, so that the most important lines appear first:

1. versions and devices. Nothing here uses the memory of a GPU, because a GPU in the exclusive compute mode would then
   refuse the ranks;
2. the ranks, see ``first.py``. Each has computed on its device and taken part in an all-reduce;
3. the facts of ``machine.py`` and the warnings of ``remarks.py``.

Spec: KIT-02, KIT-10, KIT-11.
"""

from __future__ import annotations

import os
import platform as python_platform
from collections.abc import Iterator
from typing import Any

import torch

from spec_tools.gpu import machine, remarks
from spec_tools.gpu.first import check_ranks, line_of_versions
from spec_tools.gpu.nvidia_smi import ask_command
from spec_tools.gpu.platforms import CUDA, Platform

__all__ = ["work"]


def work(platform: Platform, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yields the three findings."""
    versions = {"Python": python_platform.python_version(), "torch": torch.__version__} | _versions(platform)
    architectures = torch.cuda.get_arch_list() if platform is CUDA else []
    yield {
        "outcome": "passed",
        "versions": versions,
        "architectures": architectures,
        "devices": _gpus() if platform is CUDA else [{"name": f"device type {platform.device_type}"}],
        "processors": os.cpu_count(),
        "system": f"{python_platform.system()} {python_platform.release()}",
        "lines": [line_of_versions(versions, architectures)],
    }
    yield check_ranks(platform, num_ranks)
    facts = machine.look(platform)
    warnings = remarks.warnings(facts)
    yield {
        "outcome": "passed",
        "machine": facts,
        "warnings": warnings,
        "lines": [*machine.lines(facts), *(f"WARN {one['text']}. Remedy: {one['remedy']}" for one in warnings)],
    }


def _versions(platform: Platform) -> dict[str, str]:
    if platform is not CUDA:
        return {}
    nccl: Any = torch.cuda.nccl
    return {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version())), "driver": _driver()}


def _driver() -> str:
    text = ask_command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return next(iter((text or "").split()), "unknown, nvidia-smi gives no answer")


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = {"GiB": round(facts.total_memory / 2**30, 1)}
        found.append({"name": facts.name, "capability": f"{facts.major}.{facts.minor}", **memory})
    return found
