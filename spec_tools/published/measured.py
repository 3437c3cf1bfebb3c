"""Measurements on the ranks of this machine, for ``python -m spec_tools.published.here``.

Each rank is a process with one thread, and all share the cores. So everything is measured while all ranks do the same.
Each figure is the median of some repetitions. All ranks begin a repetition together, and it ends when all have done it.
The speed of a machine changes over minutes. So there are rounds, and each round measures everything.

Worked example, an all-gather of 4 MB takes 2 ms and one of 16 MB 5 ms: the rate is 4 GB/s, and the latency 1 ms.

Spec: CHECKED-06.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullyShardedDataParallel
from minifsdp.api import ShardingStrategy
from minifsdp_gloo import transport_between
from minifsdp_tools.simulate.setup import HYBRID
from spec_tests.oracles.gathering import wrap_units
from spec_tools.benchmarks.workloads import WORKLOADS, Workload, adamw

__all__ = ["LIMIT", "Measured", "measure"]

# Seconds after which a rank or a recording is given up. A collective has a quarter of it.
LIMIT = 600.0
MEBI = 2**20
SIZES = (MEBI, 16 * MEBI)
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
NUM_BUFFERS = 8
# A rank keeps its memory, as CUDA's allocator does. Otherwise each step takes pages from the operating system again.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_ARENA_MAX": "1"}
ROWS, COLUMNS = 16, 2048  # of the product next to a collective


@dataclass(frozen=True)
class Measured:
    """The measurements of one round, while all ranks do the same.

    Attributes:
        matmul: operations per second of matrix products in float32.
        copy: bytes per second, read and written, of a copy.
        operator: seconds of a small operator.
        phases: seconds of forward, backward and optimizer of the model with FSDP on one rank, without communication.
        costs: by kind of collective and number of ranks, the latency and the rate.
        slowdown: the share of a collective's time by which computation next to it takes longer.
        steps: seconds of a step, by strategy.
    """

    matmul: float
    copy: float
    operator: float
    phases: dict[str, float]
    costs: list[tuple[str, int, float, float]]
    slowdown: float
    steps: dict[str, float]


# ---- models ---------------------------------------------------------------------------------------------------------


class _Training:
    """A model and its optimizer. They exist in all rounds, because the first steps of a new model take longer."""

    def __init__(self, workload: Workload, strategy: str, group: Any = None) -> None:
        """Wraps the model for the ranks of a group, and trains it for one step."""
        self._loss = workload.loss
        self._model = _wrapped(workload, strategy, group)
        self._optimizer = adamw(self._model)
        ((self._inputs, self._targets),) = replace(workload, accumulate=1).batches(0, dist.get_rank())
        self.step()

    def forward(self) -> Tensor:
        """The loss."""
        return self._loss(self._model(self._inputs), self._targets)

    def update(self) -> None:
        """The optimizer's step."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> None:
        """A training step."""
        self.forward().backward()
        self.update()


def _wrapped(workload: Workload, strategy: str, group: Any) -> nn.Module:
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy], "device_id": torch.device("cpu")}
    options["process_group"] = group
    if strategy in HYBRID:
        shape = (2, dist.get_world_size() // 2)
        options["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return wrap_units(
        workload.model(), (workload.unit_class,), lambda module: FullyShardedDataParallel(module, **options)
    )


# ---- measurement ----------------------------------------------------------------------------------------------------


def _seconds(work: Callable[[], Any], repeats: int) -> float:
    """The median duration until all ranks have done the work. They begin together.

    With more ranks than cores, some ranks are done early, because the others waited for a core. The next collective
    waits for the last rank.
    """
    durations = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        durations.append(time.perf_counter() - start)
    return median(durations[1:])


def rates(repeats: int) -> tuple[float, float, float]:
    """Operations per second of matrix products, bytes per second of copies, and seconds of a small operator."""
    x, y = torch.randn(256, 512), torch.randn(512, 512)
    source, target, one = torch.randn(4 * MEBI), torch.empty(4 * MEBI), torch.ones(1)
    matmul = 2 * 256 * 512 * 512 / _seconds(lambda: x @ y, repeats)
    copy = 2 * source.nbytes / _seconds(lambda: target.copy_(source), repeats)
    return matmul, copy, _seconds(lambda: [one + one for _ in range(1000)], repeats) / 1000


def phases(training: _Training, repeats: int) -> dict[str, float]:
    """The seconds of each phase of a step, until all ranks have done it."""
    found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def now() -> float:
        dist.barrier()
        return time.perf_counter()

    for _ in range(repeats + 1):
        times = [now()]
        loss = training.forward()
        times.append(now())
        loss.backward()
        times.append(now())
        training.update()
        times.append(now())
        for name, start, end in zip(found, times, times[1:], strict=False):
            found[name].append(end - start)
    return {name: median(durations[1:]) for name, durations in found.items()}


def _groups() -> list[Any]:
    """The group of all ranks, and with more than two ranks the half of them to which this rank belongs."""
    num_ranks = dist.get_world_size()
    if num_ranks <= 2:
        return [dist.group.WORLD]
    halves = [list(range(num_ranks // 2)), list(range(num_ranks // 2, num_ranks))]
    return [dist.group.WORLD, dist.new_subgroups_by_enumeration(halves)[0]]


def collective_costs(groups: Sequence[Any], repeats: int) -> list[tuple[str, int, float, float]]:
    """The latency and the rate of each collective in each group.

    As in a step, computation on the same values precedes or follows each collective. It evicts values from the caches.
    Its own time is subtracted.
    """
    costs = []
    for group in groups:
        for kind in KINDS:
            small, large = (_collective(kind, group, size, repeats) for size in SIZES)
            rate = (SIZES[1] - SIZES[0]) / max(large - small, 1e-9)
            costs.append((kind, dist.get_world_size(group), max(0.0, small - SIZES[0] / rate), rate))
    return costs


def _start(kind: str, group: Any, whole: Tensor, shard: Tensor) -> Any:
    """Starts one of the engine's collectives. Returns its handle."""
    transport: Any = transport_between(group)
    if kind == "all-gather":
        return transport.all_gather_single(whole, shard, AllgatherOptions())
    if kind == "reduce-scatter":
        return transport.reduce_scatter_single(shard, whole, dist.ReduceScatterOptions())
    return dist.all_reduce(whole, group=group, async_op=True)


def _collective(kind: str, group: Any, size: int, repeats: int) -> float:
    """The seconds of one of the engine's collectives of ``size`` bytes, with the wait for its end."""
    x = torch.randn(ROWS, COLUMNS)
    y = torch.randn(ROWS, size // 4 // COLUMNS)
    # Each call uses other memory than the calls before it, as the next unit of a model does.
    wholes = [torch.ones(size // 4 // COLUMNS, COLUMNS) for _ in range(NUM_BUFFERS)]
    shards = [torch.ones(size // 4 // dist.get_world_size(group)) for _ in range(NUM_BUFFERS)]

    def compute(whole: Tensor) -> None:
        if kind == "all-gather":
            x @ whole.T
        else:
            torch.mm(y.T, x, out=whole)

    def both() -> None:
        for whole, shard in zip(wholes, shards, strict=True):
            compute(whole)
            _start(kind, group, whole.view(-1), shard).wait()

    alone = _seconds(lambda: [compute(whole) for whole in wholes], repeats)
    return max(0.0, _seconds(both, repeats) - alone) / NUM_BUFFERS


def slowdown(repeats: int) -> float:
    """The share of a collective's time by which computation next to it takes longer.

    It is 0 if nothing slows down, and 1 if both together take as long as one after the other. It is more if the
    collective also evicts the computation's values from the caches.
    """
    wholes = [torch.ones(SIZES[1] // 4 // NUM_BUFFERS) for _ in range(NUM_BUFFERS)]
    shards = [torch.ones(len(whole) // dist.get_world_size()) for whole in wholes]
    x, y = torch.randn(512, 512), torch.randn(512, 512)

    def compute() -> None:
        x @ y
        x @ y

    lost = overlap = 0.0
    alone = _seconds(lambda: [compute() for _ in wholes], repeats)
    for kind in KINDS:

        def together(kind: str = kind) -> None:
            for whole, shard in zip(wholes, shards, strict=True):
                handle = _start(kind, dist.group.WORLD, whole, shard)
                compute()
                handle.wait()

        def communicate(kind: str = kind) -> None:
            for whole, shard in zip(wholes, shards, strict=True):
                _start(kind, dist.group.WORLD, whole, shard).wait()

        communicating = _seconds(communicate, repeats)
        lost += _seconds(together, repeats) - max(alone, communicating)
        overlap += min(alone, communicating)
    return max(0.0, lost / overlap)


# ---- processes ------------------------------------------------------------------------------------------------------


def _round(alone: _Training, sharded: dict[str, _Training], groups: Sequence[Any], repeats: int) -> Measured:
    matmul, copy, operator = rates(repeats)
    phase_times, costs, slows = phases(alone, repeats), collective_costs(groups, repeats), slowdown(repeats)
    steps = {strategy: _seconds(training.step, repeats) for strategy, training in sharded.items()}
    return Measured(matmul, copy, operator, phase_times, costs, slows, steps)


def _rank(
    rank: int, num_ranks: int, folder: str, workload: str, strategies: Sequence[str], rounds: int, repeats: int
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store, timeout=timedelta(seconds=LIMIT / 4))
    # No rank of a group of one rank communicates.
    alone = _Training(WORKLOADS[workload], "NO_SHARD", dist.new_subgroups(1)[0])
    sharded = {strategy: _Training(WORKLOADS[workload], strategy) for strategy in strategies}
    groups = _groups()
    found = [_round(alone, sharded, groups, repeats) for _ in range(rounds)]
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps([asdict(one) for one in found]))
    dist.barrier()
    dist.destroy_process_group()


def measure(workload: str, num_ranks: int, strategies: Sequence[str], rounds: int, repeats: int) -> list[Measured]:
    """Measures each round on all ranks; the figures are those of rank 0.

    Raises:
        RuntimeError: a rank failed, or did not end in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="here-") as folder:
        arguments = (num_ranks, folder, workload, strategies, rounds, repeats)
        ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(num_ranks)]
        with patch.dict(os.environ, KEEP_MEMORY):
            for process in ranks:
                process.start()
        deadline = time.monotonic() + LIMIT
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        if any(codes) or None in codes:
            raise RuntimeError(f"the ranks ended with {codes}; None is a rank that did not end in {LIMIT:.0f} seconds")
        return [Measured(**one) for one in json.loads(Path(folder, "measured.json").read_text())]
