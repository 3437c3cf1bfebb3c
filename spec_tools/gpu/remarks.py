"""Warnings about facts of the machine that commonly make a job slow or make it fail, each with its remedy.

A warning is not a failure: the stages after it show whether the machine works.

Spec: KIT-11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spec_tools.gpu.nvidia_smi import throttle_reasons

__all__ = ["warnings"]

SMALL_SHARED_MEMORY = 512  # MiB. Docker's default is 64 MiB. NCCL uses some MiB for each pair of ranks.
FEW_OPEN_FILES = 1024
HOT = 85  # degrees Celsius
Facts = Mapping[str, Any]


def warnings(facts: Facts) -> list[dict[str, str]]:
    """One dictionary for each warning: ``about``, ``text`` and ``remedy``."""
    found = [*_of_system(facts), *_of_gpus(facts), *_of_connections(facts)]
    return [{"about": about, "text": text, "remedy": remedy} for about, text, remedy in found]


def _of_system(facts: Facts) -> Iterator[tuple[str, str, str]]:
    size = facts["shared_memory"].get("MiB", SMALL_SHARED_MEMORY)
    if size < SMALL_SHARED_MEMORY:
        yield (
            "shared memory",
            f"/dev/shm has {size} MiB, and NCCL fails or crashes with SIGBUS if it needs more",
            "start the container with --shm-size=1g or --ipc=host",
        )
    open_files = facts["limits"].get("open files", "unlimited")
    if open_files.isdigit() and int(open_files) < FEW_OPEN_FILES:
        yield "open files", f"a process can open {open_files} files", "ulimit -n 65536"
    for line in facts["xid"] or ():
        yield (
            "XID",
            f"the driver has reported an error: {line}",
            "look up the number in NVIDIA's list of XID errors; 48, 63, 64, 74, 79, 94 and 95 are faults of hardware",
        )
    if facts["mps"]:
        yield (
            "MPS",
            "the Multi-Process Service is running: a fault of one process can end the others",
            "stop it for this run: echo quit | nvidia-cuda-mps-control",
        )
    for name in ("CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if facts["variables"].get(name, "0") != "0":
            yield "variables", f"{name} is set, so times are not normal", f"unset {name}, unless this is intended"


def _of_gpus(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for gpu in facts["gpus"]:
        name = f"GPU {gpu.get('index', '?')}"
        mode = gpu.get("compute mode", "Default")
        if "xclusive" in mode or mode == "Prohibited":
            yield (
                "compute mode",
                f"{name} is in the compute mode {mode}: it refuses a second process",
                f"sudo nvidia-smi -i {gpu.get('index', '0')} -c DEFAULT",
            )
        if gpu.get("MIG") == "Enabled":
            yield (
                "MIG",
                f"{name} is divided by MIG: a process sees one instance, and instances have no peer access",
                f"sudo nvidia-smi -i {gpu.get('index', '0')} -mig 0, or use one rank",
            )
        for reason in throttle_reasons(gpu.get("throttle reasons", "")):
            yield (
                "throttling",
                f"the clocks of {name} are reduced: {reason}",
                "wait until the GPU is idle and cool, and check cooling and power; until then times have no meaning",
            )
        if gpu.get("persistence mode") == "Disabled":
            yield "persistence", f"the persistence mode of {name} is off: each start takes seconds", "nvidia-smi -pm 1"
        yield from _of_memory(name, gpu)
    for one in facts["processes"]:
        yield (
            "other processes",
            f"{one['processes']} processes use GPU {one['GPU']}, with {one['MiB']} MiB",
            "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES; until then times have no meaning",
        )


def _of_memory(name: str, gpu: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    errors = gpu.get("uncorrected ECC errors", "0")
    if errors.isdigit() and int(errors) > 0:
        yield (
            "ECC",
            f"{name} has {errors} uncorrected memory errors since the driver was loaded",
            "do not trust its results: reset or replace the GPU",
        )
    temperature = gpu.get("temperature", "0")
    if temperature.isdigit() and int(temperature) >= HOT:
        yield "temperature", f"{name} has {temperature} degrees", "check the cooling; the clocks will be reduced"


def _of_connections(facts: Facts) -> Iterator[tuple[str, str, str]]:
    access = facts["peer_access"]
    missing = [(i, j) for i, row in enumerate(access) for j, yes in enumerate(row) if i != j and not yes]
    if missing:
        pairs = ", ".join(f"{i} to {j}" for i, j in missing[:8]) + (", ..." if len(missing) > 8 else "")
        yield (
            "peer access",
            f"no access to the memory of another GPU: {pairs}. NCCL copies through the host, which is slow",
            "in a virtual machine or with an IOMMU, switch ACS off in the firmware; consumer cards have no peer access",
        )
    links = facts["nvlinks"]
    if links and min(links) < max(links):
        yield (
            "NVLink",
            f"the GPUs have different numbers of active NVLinks: {', '.join(map(str, links))}",
            "nvidia-smi nvlink --status names the inactive links; check the fabric manager",
        )
