"""Facts of this machine that often explain a failure: GPUs and their connections, limits, container, variables.

Nothing here is required, nothing runs a kernel, and each fact is optional. Values that contain folders or names of
hosts are hidden.

Spec: KIT-11.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from spec_tools.gpu import nvidia_smi
from spec_tools.gpu.nvidia_smi import Ask
from spec_tools.gpu.platforms import Platform

__all__ = ["lines", "look"]

VARIABLES = re.compile(
    r"(NCCL|TORCH|CUDA|PYTORCH|GLOO|UCX|MINIFSDP)_|MASTER_|(OMP_NUM_THREADS|WORLD_SIZE|RANK|LOCAL_RANK|LOCAL_WORLD_SIZE"
    r"|LD_PRELOAD|SLURM_(NNODES|NTASKS|GPUS\w*))$"
)
# The kit sets these for its chunks.
OWN = re.compile(r"MINIFSDP_KIT|TORCH_(FR|NCCL)_(BUFFER|TRACE|DUMP|DEBUG_INFO)")
HIDDEN = "(hidden)"
# A folder, an address, or a name with dots. Numbers such as 1.5 and lists such as 0,1 are shown.
PRIVATE_VALUE = re.compile(r"/|\d+\.\d+\.\d+|[A-Za-z][\w-]*\.[A-Za-z]|GPU-[0-9a-f]{4}|MIG-[0-9a-f]{4}|@")
PRIVATE_NAMES = re.compile(r"MASTER_ADDR|NCCL_HOSTID|NCCL_COMM_ID|.*(TOKEN|KEY|SECRET|PASSWORD)")
MIB = 2**20


def look(
    platform: Platform,
    ask: Ask = nvidia_smi.ask_command,
    environment: Mapping[str, str] = os.environ,
    system: Path = Path("/"),
) -> dict[str, Any]:
    """All facts. Tests replace nvidia-smi, the environment variables, and the root folder."""
    found = nvidia_smi.gpus(ask)
    return {
        "gpus": found,
        "topology": nvidia_smi.topology(ask),
        "nvlinks": nvidia_smi.nvlinks(ask),
        "peer_access": platform.peer_access(),
        "processes": nvidia_smi.other_processes(ask, found),
        "xid": nvidia_smi.xid_lines(ask),
        "mps": _runs_mps(system, environment),
        "shared_memory": _shared_memory(system),
        "limits": _limits(),
        "container": _container(system, environment),
        "variables": variables(environment),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that matter, with hidden values where they are private."""
    chosen = {name: environment[name] for name in sorted(environment) if VARIABLES.match(name) and not OWN.match(name)}
    return {
        name: HIDDEN if PRIVATE_VALUE.search(value) or PRIVATE_NAMES.match(name) else value
        for name, value in chosen.items()
    }


def _runs_mps(system: Path, environment: Mapping[str, str]) -> bool:
    if "CUDA_MPS_PIPE_DIRECTORY" in environment:
        return True
    for path in (system / "proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().startswith("nvidia-cuda-mps"):
                return True
    return False


def _shared_memory(system: Path) -> dict[str, int]:
    with suppress(OSError):
        usage = shutil.disk_usage(system / "dev" / "shm")
        return {"MiB": usage.total // MIB, "free MiB": usage.free // MIB}
    return {}


def _limits() -> dict[str, str]:
    kinds = {"locked memory": resource.RLIMIT_MEMLOCK, "open files": resource.RLIMIT_NOFILE}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: "unlimited" if value == resource.RLIM_INFINITY else str(value) for name, value in soft.items()}


def _container(system: Path, environment: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    for path, name in ((".dockerenv", "Docker"), ("run/.containerenv", "Podman"), (".singularity.d", "Singularity")):
        if (system / path).exists():
            return name
    return environment.get("container", "")


def lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts as lines for the terminal."""
    return [*_gpu_lines(facts), *_connection_lines(facts), *_system_lines(facts)]


def _gpu_lines(facts: Mapping[str, Any]) -> list[str]:
    hidden = ("index", "name", "bus", "driver")
    found = [
        f"GPU {gpu.get('index')}: " + ", ".join(f"{name} {value}" for name, value in gpu.items() if name not in hidden)
        for gpu in facts["gpus"]
    ]
    return found or ["nvidia-smi gives no answer here"]


def _connection_lines(facts: Mapping[str, Any]) -> list[str]:
    found = [f"  {line}" for line in facts["topology"].get("text", "").splitlines()]
    if found:
        found.insert(0, "topology (NV: NVLink; PIX, PXB, PHB, NODE, SYS: PCIe, from near to far):")
    if facts["nvlinks"]:
        found.append(f"active NVLinks by GPU: {', '.join(map(str, facts['nvlinks']))}")
    if len(facts["peer_access"]) > 1:
        found.append("peer access (row: from, column: to):")
        found += ["  " + " ".join("yes" if yes else "NO " for yes in row) for row in facts["peer_access"]]
    return found


def _system_lines(facts: Mapping[str, Any]) -> list[str]:
    xid = facts["xid"]
    errors = "not readable" if xid is None else f"{len(xid)} lines" if xid else "none"
    found = [f"XID errors in the kernel's log: {errors}", *(f"  {line}" for line in xid or ())]
    shared = facts["shared_memory"]
    size = f"{shared['MiB']} MiB, {shared['free MiB']} MiB free" if shared else "unknown"
    limits = ", ".join(f"{name} {value}" for name, value in facts["limits"].items())
    found.append(f"/dev/shm: {size}; limits: {limits}; MPS: {'yes' if facts['mps'] else 'no'}")
    found.append(f"container: {facts['container'] or 'none detected'}")
    settings = [f"{name}={value}" for name, value in facts["variables"].items()]
    return [*found, f"variables: {' '.join(settings) or 'none'}"]
