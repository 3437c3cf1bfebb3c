"""A training step of a contender on every rank: its losses, its time, and figures that hardly depend on the load.

**Python calls** are counted by the interpreter itself. Their cost differs between machines, but no other figure grows
so steadily with the time that a library adds to a tiny unit.

**Bytes** are counted twice. *Asked* is the number of bytes that textbook algorithms send for the collectives of a
library: ``(N - 1) / N * M`` for an all-gather or a reduce-scatter of M bytes on N ranks, twice that for an all-reduce.
*Wired* is the number of bytes that the sockets of this process have sent, according to the kernel (Linux only). The two
differ, because gloo implements a reduce-scatter as an all-reduce.

**Memory** contains all tensors, including those that C++ allocates and that Python code cannot access: torch's CPU
allocator reports each allocation and each release to a profiler. Worked example in MiB; the step begins at the mark::

    +64 (model)  +32 (shards)  -64   mark   +16  +16  -16   +8  -24
     64           96            32           48   64   48   56   32      the peak is 64 (and not 96)
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from spec_tests.costs.count_calls import calls_by_file
from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.workloads import WORKLOADS, Batch, Workload, adamw
from tutorials.gpt.counting import CollectiveCounter

NUM_CHECKED = 3
NUM_WEIGHED = 5
TCP_INFO = 11
# Offset of `tcpi_bytes_sent` in the kernel's `struct tcp_info`, since Linux 4.19.
BYTES_SENT = 200
MARK = "spec_tools: a step"


class Trainer:
    """A contender with a model of its own."""

    def __init__(self, contender: str, workload: Workload) -> None:
        self.workload = workload
        self.trained = CONTENDERS[contender].take(workload.model(), workload)
        self.optimizer = adamw(self.trained.model)

    def step(self, batches: list[Batch]) -> list[Tensor]:
        """Runs one step; returns the loss of each micro-batch."""
        self.optimizer.zero_grad()
        losses = []
        for number, (inputs, targets) in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else self.trained.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.trained.autocasts):
                    output = self.trained.model(inputs)
                loss = self.workload.loss(output.float(), targets)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return losses


def train(timer: Callable[[Callable[[], Any]], None], name: str, contender: str) -> dict[str, Any]:
    """Checks the losses, times the step, and measures the other figures."""
    workload = WORKLOADS[name]
    found = _timed(timer, workload, contender)
    # Without the model that was timed.
    gc.collect()
    return {**found, **memory(contender, workload)}


def _timed(timer: Callable[[Callable[[], Any]], None], workload: Workload, contender: str) -> dict[str, Any]:
    trainer = Trainer(contender, workload)
    difference = check_losses(trainer, contender)
    batches = workload.batches(NUM_CHECKED, dist.get_rank())

    def step() -> None:
        trainer.step(batches)

    timer(step)
    return {"difference": difference, **figures(step)}


def reference_losses(workload: Workload) -> Tensor:
    """The losses of a single process that trains on the batches of all ranks: (steps, ranks, micro-batches)."""
    model = workload.model()
    optimizer = adamw(model)
    losses = torch.empty(NUM_CHECKED, workload.num_ranks, workload.accumulate)
    for step in range(NUM_CHECKED):
        optimizer.zero_grad()
        for rank in range(workload.num_ranks):
            for number, (inputs, targets) in enumerate(workload.batches(step, rank)):
                with torch.autocast("cpu", torch.bfloat16, enabled=workload.bf16):
                    output = model(inputs)
                loss = workload.loss(output.float(), targets)
                (loss / workload.accumulate / workload.num_ranks).backward()
                losses[step, rank, number] = loss.detach()
        optimizer.step()
    return losses


def check_losses(trainer: Trainer, contender: str) -> float:
    """Trains a few steps; returns the largest relative difference of a loss of this rank.

    Raises:
        AssertionError: it is larger than the tolerance of the workload.
    """
    workload, rank = trainer.workload, dist.get_rank()
    expected = reference_losses(workload)[:, rank]
    steps = [trainer.step(workload.batches(step, rank)) for step in range(NUM_CHECKED)]
    found = torch.tensor([[float(loss) for loss in losses] for losses in steps])
    # Later steps of `single` would need the gradients of other ranks' batches.
    num_equal = 1 if contender == "single" else NUM_CHECKED
    difference = float(((found - expected).abs() / expected.abs())[:num_equal].max())
    if not difference <= workload.tolerance:
        raise AssertionError(
            f"rank {rank}: {contender} trains {workload.name} to other losses than one process does: {found.tolist()} "
            f"and not {expected.tolist()}. Its times mean nothing"
        )
    return difference


def figures(step: Callable[[], Any]) -> dict[str, int]:
    """Python calls, bytes asked in total and by collectives of sharding, and bytes wired. Every rank must call it."""
    calls = calls_by_file(step).total()
    # After a barrier, no rank is still sending bytes of earlier operations.
    dist.barrier()
    before = _sent()
    with CollectiveCounter() as counter:
        step()
    dist.barrier()
    inside = counter.num_bytes["all-gather"] + counter.num_bytes["reduce-scatter"]
    return {"calls": calls, "asked": counter.bytes_sent, "inside": inside, "wired": _sent() - before}


def _sent() -> int:
    total = 0
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):  # closed, or not TCP
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as end:
                    reported = end.getsockopt(socket.IPPROTO_TCP, TCP_INFO, BYTES_SENT + 8)
                    total += struct.unpack_from("Q", reported, BYTES_SENT)[0]
    return total


def memory(contender: str, workload: Workload) -> dict[str, Any]:
    """Bytes in live tensors between two steps and at the peak of a step. Every rank must call it.

    Memory that a backend allocates differently, such as some buffers of gloo, is not counted.
    """
    # By default, memory freed by gloo's threads counts as live.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    batches = workload.batches(0, dist.get_rank())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        trainer = Trainer(contender, workload)
        # The first step creates the optimizer's state and everything that a library keeps between steps.
        trainer.step(batches)
        for _ in range(NUM_WEIGHED):
            trainer.optimizer.zero_grad()
            # Until gloo's threads have released their temporary buffers.
            dist.barrier()
            time.sleep(0.1)
            with record_function(MARK):
                trainer.step(batches)
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    events = sorted(_all(tree), key=lambda event: event.start_time_ns)
    # Each allocation has the live bytes of all threads.
    allocations = [event for event in events if hasattr(event.typed[1], "total_allocated")]
    zero = allocations[0].typed[1].total_allocated - allocations[0].typed[1].alloc_size
    live = [(event.start_time_ns, event.typed[1].total_allocated - zero) for event in allocations]
    marks = [event for event in events if event.name == MARK]
    # The number of gloo's buffers that are alive at once varies, so this is the median of the peaks of some steps.
    peaks = [max(_within(live, mark.start_time_ns, mark.end_time_ns)) for mark in marks]
    return {"between_steps": _within(live, 0, marks[0].start_time_ns)[-1], "peak": sorted(peaks)[NUM_WEIGHED // 2]}


def _within(live: list[tuple[int, int]], begin: int, end: int) -> list[int]:
    return [size for moment, size in live if begin <= moment <= end]


def _all(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)
