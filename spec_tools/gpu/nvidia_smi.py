"""Facts about the GPUs from ``nvidia-smi`` and from the log of the kernel. Everything is optional: a command can be
missing.

Each function has the argument ``ask``, which runs a command and returns its output, or ``None`` if there is none. Tests
pass a function with recorded texts.

The texts that are parsed::

    nvidia-smi --query-gpu=index,...   0, NVIDIA H100 80GB HBM3, Default, ...
    nvidia-smi topo -m                         GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
                                       GPU0     X      NV18    PIX     0-51            0
    nvidia-smi nvlink --status         GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-...)
                                                Link 0: 26.562 GB/s
    dmesg                              [12.3] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=python, GPU has fallen off ...

Spec: KIT-11.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["FIELDS", "Ask", "ask_command", "gpus", "nvlinks", "other_processes", "topology", "xid_lines"]

Ask = Callable[[Sequence[str]], str | None]
LIMIT = 10.0  # seconds for one command. A GPU in a bad state makes nvidia-smi wait for minutes.
NUM_XID_LINES = 20

# Field of nvidia-smi -> name in the report.
FIELDS = {
    "index": "index",
    "name": "name",
    "pci.bus_id": "bus",
    "driver_version": "driver",
    "memory.total": "memory",
    "memory.free": "free memory",
    "compute_mode": "compute mode",
    "persistence_mode": "persistence mode",
    "mig.mode.current": "MIG",
    "ecc.mode.current": "ECC",
    "ecc.errors.uncorrected.volatile.total": "uncorrected ECC errors",
    "ecc.errors.corrected.volatile.total": "corrected ECC errors",
    "temperature.gpu": "temperature",
    "clocks_throttle_reasons.active": "throttle reasons",
    "pcie.link.gen.current": "PCIe generation",
    "pcie.link.width.current": "PCIe width",
}
# Bits of the throttle reasons. The first two are normal: the GPU is idle, or a user has set its clocks.
HARMLESS_BITS = 0x1 | 0x2
THROTTLE_BITS = {
    0x4: "power cap by software",
    0x8: "slowdown by hardware",
    0x10: "clocks of another GPU (sync boost)",
    0x20: "temperature limit of software",
    0x40: "temperature limit of hardware",
    0x80: "external power brake",
    0x100: "setting of the display clock",
}


def ask_command(words: Sequence[str]) -> str | None:
    """Runs a command; returns its output, or ``None`` if it does not exist, fails, or does not end in time."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # nvidia-smi prints errors about a field to the output, and the caller needs them.
    return done.stdout if done.returncode == 0 or "not a valid field" in done.stdout else None


def gpus(ask: Ask) -> list[dict[str, str]]:
    """A dictionary for each GPU, with the fields that this driver knows."""
    fields = list(FIELDS)
    while fields:
        text = ask(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
        if text is None:
            return []
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown is None:
            rows = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
            names = [FIELDS[field] for field in fields]
            return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
        if unknown[1] not in fields:
            return []
        fields.remove(unknown[1])
    return []


def throttle_reasons(active: str) -> list[str]:
    """The reasons in a value such as ``0x0000000000000040``, without the harmless ones."""
    if not re.fullmatch(r"0x[0-9A-Fa-f]+", active):
        return []
    bits = int(active, 16) & ~HARMLESS_BITS
    return [word for bit, word in THROTTLE_BITS.items() if bits & bit]


def topology(ask: Ask) -> dict[str, Any]:
    """The matrix of connections, as text and as ``{"GPU0": {"GPU1": "NV18"}}``; empty without nvidia-smi."""
    text = ask(["nvidia-smi", "topo", "-m"])
    if not text:
        return {}
    # Some versions underline the head of the table with escape sequences.
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in text.splitlines()]
    table = [line for line in lines if re.match(r"\s*(GPU\d|NIC\d|mlx)\w*\s", line)]
    if not table:
        return {}
    names = [word for word in table[0].split() if re.fullmatch(r"(GPU|NIC)\d+|mlx\w+", word)]
    rows = {line.split()[0]: line.split()[1:] for line in table[1:]}
    found = {
        name: {other: word for other, word in zip(names, words, strict=False) if other != name}
        for name, words in rows.items()
    }
    return {"text": "\n".join(table), "connections": found}


def nvlinks(ask: Ask) -> list[int]:
    """The number of active NVLink connections of each GPU; empty without nvidia-smi."""
    counts: list[int] = []
    for line in (ask(["nvidia-smi", "nvlink", "--status"]) or "").splitlines():
        if re.match(r"GPU \d+:", line):
            counts.append(0)
        elif counts and re.match(r"\s+Link \d+: [\d.]+ GB/s", line):
            counts[-1] += 1
    return counts


def other_processes(ask: Ask, found: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """The number of processes that compute on each GPU, and their memory. Without their names and users."""
    fields = "--query-compute-apps=gpu_bus_id,used_memory"
    text = ask(["nvidia-smi", fields, "--format=csv,noheader,nounits"])
    numbers = {gpu["bus"]: gpu["index"] for gpu in found if "bus" in gpu}
    sums: dict[str, list[int]] = {}
    for line in (text or "").splitlines():
        bus, _, used = (part.strip() for part in line.partition(","))
        if bus in numbers:
            sums.setdefault(numbers[bus], []).append(int(used) if used.isdigit() else 0)
    return [{"GPU": index, "processes": len(used), "MiB": sum(used)} for index, used in sums.items()]


def xid_lines(ask: Ask) -> list[str] | None:
    """Errors of GPUs in the kernel's log, such as ``GPU 0000:1b:00: Xid 79, ...``; ``None`` if it is not readable."""
    text = ask(["dmesg"])
    if not text:
        return None
    found = re.findall(r"NVRM: Xid \(PCI:([\w:.]+)\): (\d+),?(.*)", text)
    lines = [f"GPU {bus}: Xid {number}{_without_process(rest)}" for bus, number, rest in found]
    return lines[-NUM_XID_LINES:]


def _without_process(text: str) -> str:
    parts = [part.strip() for part in text.split(",")]
    kept = [part for part in parts if part and not re.match(r"(pid|name)=", part)]
    return ", " + ", ".join(kept) if kept else ""
