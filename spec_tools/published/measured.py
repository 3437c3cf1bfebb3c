"""Measurements on the ranks of this machine, for ``python -m spec_tools.published.here``.

Each rank is a process with one thread, and all share the cores. So everything is measured while all ranks do the same.
Each figure is the median of some repetitions, which all ranks begin together.

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
from minifsdp.engine.gloo import transport_between
from minifsdp.simulate.setup import HYBRID
from spec_tests.oracles.gathering import wrap_units
from spec_tools.benchmarks.workloads import WORKLOADS, Workload, adamw

__all__ = ["LIMIT", "Measured", "measure"]

# Seconds after which a rank or a recording is given up. A collective has a quarter of it.
LIMIT = 600.0
MEBI = 2**20
SIZES = (MEBI, 16 * MEBI)
NUM_BUFFERS = 8
# A rank keeps its memory, as CUDA's allocator does. Otherwise each step takes pages from the operating system again.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_ARENA_MAX": "1"}
ROWS, COLUMNS = 16, 2048  # of the product next to a collective


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank while all ranks do the same.

    Attributes:
        matmul: operations per second of matrix products in float32.
        copy: bytes per second, read and written, of a copy.
        operator: seconds of a small operator.
        phases: seconds of forward, backward and optimizer of the plain model.
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


# ---- measurement ----------------------------------------------------------------------------------------------------


def _seconds(work: Callable[[], Any], repeats: int) -> float:
    """The median duration. All ranks begin together."""
    durations = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return median(durations[1:])


def rates(repeats: int) -> tuple[float, float, float]:
    """Operations per second of matrix products, bytes per second of copies, and seconds of a small operator."""
    x, y = torch.randn(256, 512), torch.randn(512, 512)
    source, target, one = torch.randn(4 * MEBI), torch.empty(4 * MEBI), torch.ones(1)
    matmul = 2 * 256 * 512 * 512 / _seconds(lambda: x @ y, repeats)
    copy = 2 * source.nbytes / _seconds(lambda: target.copy_(source), repeats)
    return matmul, copy, _seconds(lambda: [one + one for _ in range(100)], repeats) / 100


def phases(workload: Workload, repeats: int) -> dict[str, float]:
    """The seconds of each phase of a step of the plain model."""
    model = workload.model()
    optimizer = adamw(model)
    ((inputs, targets),) = replace(workload, accumulate=1).batches(0, dist.get_rank())
    found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    for _ in range(repeats + 1):
        dist.barrier()
        times = [time.perf_counter()]
        loss = workload.loss(model(inputs), targets)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        for name, start, end in zip(found, times, times[1:], strict=False):
            found[name].append(end - start)
    return {name: median(durations[1:]) for name, durations in found.items()}


def collective_costs(repeats: int) -> list[tuple[str, int, float, float]]:
    """The latency and the rate of each collective, between all ranks and between each half of them.

    As in a step, computation on the same values precedes or follows each collective. It evicts values from the caches.
    Its own time is subtracted.
    """
    num_ranks = dist.get_world_size()
    groups = [dist.group.WORLD]
    if num_ranks > 2:
        halves = [list(range(num_ranks // 2)), list(range(num_ranks // 2, num_ranks))]
        groups += [dist.new_subgroups_by_enumeration(halves)[0]]
    costs = []
    for group in groups:
        for kind in ("all-gather", "reduce-scatter", "all-reduce"):
            small, large = (_collective(kind, group, size, repeats) for size in SIZES)
            rate = (SIZES[1] - SIZES[0]) / max(large - small, 1e-9)
            costs.append((kind, dist.get_world_size(group), max(0.0, small - SIZES[0] / rate), rate))
    return costs


def _collective(kind: str, group: Any, size: int, repeats: int) -> float:
    """The seconds of one of the engine's collectives of ``size`` bytes, with the wait for its end."""
    transport: Any = transport_between(group)
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

    def communicate(whole: Tensor, shard: Tensor) -> None:
        if kind == "all-gather":
            transport.all_gather_single(whole.view(-1), shard, AllgatherOptions()).wait()
        elif kind == "reduce-scatter":
            transport.reduce_scatter_single(shard, whole.view(-1), dist.ReduceScatterOptions()).wait()
        else:
            dist.all_reduce(whole, group=group)

    def both() -> None:
        for whole, shard in zip(wholes, shards, strict=True):
            compute(whole)
            communicate(whole, shard)

    alone = _seconds(lambda: [compute(whole) for whole in wholes], repeats)
    return max(0.0, _seconds(both, repeats) - alone) / NUM_BUFFERS


def slowdown(repeats: int) -> float:
    """The share of an all-gather's time by which computation next to it takes longer."""
    transport: Any = transport_between(dist.group.WORLD)
    output = torch.ones(SIZES[1] // 4)
    shard = torch.ones(len(output) // dist.get_world_size())
    x, y = torch.randn(512, 512), torch.randn(512, 512)

    def gather() -> Any:
        return transport.all_gather_single(output, shard, AllgatherOptions())

    def compute() -> None:
        for _ in range(8):
            x @ y

    def both() -> None:
        handle = gather()
        compute()
        handle.wait()

    alone, gathering, together = (_seconds(work, repeats) for work in (compute, lambda: gather().wait(), both))
    overlap = min(alone, gathering)
    # Together they take `alone` if nothing slows down, and the sum if they share one core.
    return min(1.0, max(0.0, (together - max(alone, gathering)) / overlap))


def _step(workload: Workload, strategy: str, repeats: int) -> float:
    """The seconds of a step of a sharded model, measured."""
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy], "device_id": torch.device("cpu")}
    if strategy in HYBRID:
        shape = (2, dist.get_world_size() // 2)
        options["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model: nn.Module = wrap_units(
        workload.model(), (workload.unit_class,), lambda module: FullyShardedDataParallel(module, **options)
    )
    optimizer = adamw(model)
    ((inputs, targets),) = replace(workload, accumulate=1).batches(0, dist.get_rank())

    def train() -> None:
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    return _seconds(train, repeats)


# ---- processes ------------------------------------------------------------------------------------------------------


def _rank(rank: int, num_ranks: int, folder: str, workload: str, strategies: Sequence[str], repeats: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store, timeout=timedelta(seconds=LIMIT / 4))
    job = WORKLOADS[workload]
    matmul, copy, operator = rates(repeats)
    phase_times, costs, slows = phases(job, repeats), collective_costs(repeats), slowdown(repeats)
    steps = {strategy: _step(job, strategy, repeats) for strategy in strategies}
    if rank == 0:
        found = Measured(matmul, copy, operator, phase_times, costs, slows, steps)
        Path(folder, "measured.json").write_text(json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


def measure(workload: str, num_ranks: int, strategies: Sequence[str], repeats: int) -> Measured:
    """Measures on all ranks; the figures are those of rank 0.

    Raises:
        RuntimeError: a rank failed, or did not end in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="here-") as folder:
        arguments = (num_ranks, folder, workload, strategies, repeats)
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
        return Measured(**json.loads(Path(folder, "measured.json").read_text()))
