"""Counts the objects of a process. The difference between two counts shows the growth."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import threading
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from minifsdp.checks.collective_log import log
from minifsdp_gloo import transport as gloo

__all__ = ["Sample", "grown", "taken"]

MIB = 2**20
# Allowed growth in bytes after the warm-up, because allocators round, and caches of torch and of Python fill slowly.
# A leak of 100 bytes in each of 2,000 steps exceeds the first limit.
MOST_MORE = {"python_bytes": 150_000, "resident_bytes": 16 * MIB}


@dataclass(frozen=True)
class Sample:
    """The counts after a step.

    Attributes:
        step: the number of the step.
        tensors: number of living tensors, and ``tensor_bytes`` of their storages.
        descriptors: open file descriptors of the process.
        threads: of the operating system.
        objects: instances of classes of minifsdp, including all in its queues and records.
        queued: messages that the transport between CPUs keeps until they have arrived.
        ledger: entries of the collective log, and the sizes that transports store.
        on_disk: files and folders below the folder of checkpoints.
        python_bytes: bytes that Python has allocated since counting began; 0 if they are not traced.
        resident_bytes: of the process.
        kinds: the objects by class.
    """

    step: int
    tensors: int
    tensor_bytes: int
    descriptors: int
    threads: int
    objects: int
    queued: int
    ledger: int
    on_disk: int
    python_bytes: int
    resident_bytes: int
    kinds: dict[str, int]


def taken(step: int, folder: pathlib.Path) -> Sample:
    """Collects garbage and counts.

    Args:
        step: the number of the step before.
        folder: of the checkpoints.
    """
    gc.collect()
    everything = gc.get_objects()
    tensors = [one for one in everything if issubclass(type(one), torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if _is_plain(one)}
    # For some classes `__module__` is not a string.
    ours = [one for one in everything if str(type(one).__module__).partition(".")[0] == "minifsdp"]
    return Sample(
        step=step,
        tensors=len(tensors),
        tensor_bytes=sum(storages.values()),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=max(threading.active_count(), len(os.listdir("/proc/self/task"))),
        objects=len(ours),
        queued=_num_queued(),
        ledger=sum(len(one.entries) for one in log.sequences.values())
        + sum(len(transport._known) for transport in gloo._transports.values()),
        on_disk=len([*folder.rglob("*")]),
        python_bytes=tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0,
        resident_bytes=_resident(),
        kinds=dict(Counter(type(one).__qualname__ for one in ours)),
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    # For a DTensor only the local shard is counted, which is a tensor of its own.
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def _num_queued() -> int:
    return sum(len(transport._in_flight) for transport in gloo._transports.values())


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(samples: Sequence[Sample]) -> list[str]:
    """Describes the growth.

    A leak is a growth in each round. A dict of Python that grows is copied once, into a table of twice its size. For
    this reason, numbers of bytes are compared without the round in which they grew most, if there are several rounds.

    Args:
        samples: in the order in which they were taken, at least two.
    """
    found = []
    counts = [asdict(sample) for sample in samples]
    for name in counts[0]:
        if name in ("step", "kinds"):
            continue
        values = [count[name] for count in counts]
        growth = values[-1] - values[0]
        if name in MOST_MORE and len(values) > 2:
            growth -= max(0, *(after - before for before, after in itertools.pairwise(values)))
        if growth > MOST_MORE.get(name, 0):
            steps = [f"{count[name]:,} after step {count['step']}" for count in counts]
            found.append(f"{name}: {', '.join(steps)}")
    if more := Counter(samples[-1].kinds) - Counter(samples[0].kinds):
        found.append(f"kinds: {dict(more)} more")
    return found


def line(sample: Sample) -> str:
    """One line of a table."""
    numbers: dict[str, Any] = {name: value for name, value in asdict(sample).items() if name != "kinds"}
    return "  ".join(f"{name} {value:,}" for name, value in numbers.items())
