"""How the calls of an FSDP grow with the number of units, ranks, and parameters in a unit, and a model of 7 billion.

    python -m spec_tools.benchmarks.growth

The command counts the Python calls of all points, and writes them to ``docs/data/growth.json``, the source of the plots
in ``docs/benchmarks.md``. The times and the memory in this file were measured once. The program that measured them is
in the history of the repository, as this file of commit 2c8aa35e.

The process group is torch's *fake* one, a world of up to 1024 ranks in which only rank 0 exists and nothing is sent.
So the step only contains the work of the library, which is the part that can grow. Worked example, Python calls in a
step of a library that does some work for the whole model and some for each unit::

    units                     12      48     192
    calls above the plain   1198    4726   18838      some for the whole step, the rest for each unit
    for each unit           99.8    98.5    98.1      falls to a limit; it would rise if each unit visited all units

The model of 7 billion is a decoder in the shape of Llama 7B. It is built on meta, where a parameter is a shape without
memory, sharded, and materialized. The two front ends materialize it in different ways::

    FSDP1           wrapping materializes a whole unit, shards it and frees the other shards: one unit at a time
    fully_shard     shards the shapes; `to_empty` then materializes only the shards of this rank

Each materialized weight is filled with a constant, because the system only provides memory when it is written.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from spec_tests.costs.count_calls import calls_by_file
from spec_tools.benchmarks.contenders import CONTENDERS, OURS, TORCH, materialized
from spec_tools.benchmarks.page import DATA
from spec_tools.benchmarks.workloads import Batch, Workload

FSDPS = {name: contender for name, contender in CONTENDERS.items() if contender.shards}
AXES = {"units": (12, 48, 192, 768), "ranks": (2, 16, 128, 1024), "parameters": (1, 4, 16, 64)}
WIDTH = 8
NUM_WARM = 3

# --- the points: each axis varies one value, and the other values have common defaults ---


class Layer(nn.Module):
    """A unit with ``num_parameters`` weights, applied one after the other."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


@dataclass(frozen=True)
class Point:
    """A model, sharded for rank 0 of a world.

    Attributes:
        units: number of units in addition to the root, which has no parameters of its own.
        ranks: number of ranks in the world.
        parameters: number of parameters in each unit.
    """

    units: int = 48
    ranks: int = 2
    parameters: int = 2

    def workload(self) -> Workload:
        """The point as a workload for the contenders."""
        return Workload("growth", "", self._build, Layer, _rows, F.mse_loss)

    def _build(self) -> nn.Module:
        return nn.Sequential(*(Layer(self.parameters) for _ in range(self.units)))


def _rows(generator: torch.Generator) -> Batch:
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def points_of(axis: str) -> list[Point]:
    """The points of one axis. The parameters axis uses only a quarter of the units, because they are larger."""
    middle = Point(units=12) if axis == "parameters" else Point()
    return [replace(middle, **{axis: value}) for value in AXES[axis]]


def join(num_ranks: int) -> None:
    """Makes this process rank 0 of a fake world."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())


def calls_per_step(contender: str, point: Point) -> int:
    """Python calls in a step after the warm-up, minus those of the plain model."""
    workload = point.workload()
    sharded = FSDPS[contender].take(workload.model(), workload).model
    return _calls(sharded, workload) - _calls(workload.model(), workload)


def _calls(model: nn.Module, workload: Workload) -> int:
    inputs, targets = workload.batches(0, 0)[0]

    def step() -> None:
        workload.loss(model(inputs), targets).backward()

    for _ in range(NUM_WARM):
        step()
        model.zero_grad()
    return calls_by_file(step).total()


# --- the large model ---


class Shape(NamedTuple):
    """Sizes of a decoder; ``inner`` is the width between the two ends of a gated layer."""

    blocks: int
    width: int
    inner: int
    vocabulary: int


class Block(nn.Module):
    """Attention and the gated layer: seven matrices and two vectors."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norm, self.other_norm = nn.RMSNorm(width), nn.RMSNorm(width)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. Only shapes matter, so there is no forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.inner) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)


def materialised(contender: str, shape: Shape) -> nn.Module:
    """The decoder, sharded for this rank by ``contender``, and materialized."""
    library = TORCH if contender.startswith("torch") else OURS
    is_function = contender.endswith("FSDP2")
    options = {} if is_function else {"use_orig_params": contender.endswith("orig")}
    return materialized(library, lambda: Decoder(shape), Block, by_function=is_function, **options)


def stored_bytes(model: nn.Module) -> int:
    """The total size of the storages of this rank's parameters, each counted once."""
    locals_ = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    storages = [tensor.untyped_storage() for tensor in locals_]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# --- the command ---


def count(contender: str, point: Point) -> float:
    """The calls for each unit; must run in a process of its own, because it joins a fake world."""
    join(point.ranks)
    return round(calls_per_step(contender, point) / point.units, 3)


def main() -> None:
    """Counts the calls of all points, each in a new process, and writes them to the record."""
    # Set before the fork server starts, so that its processes inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    path = DATA / "growth.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    for axis in AXES:
        for name in FSDPS:
            for kept, point in zip(record[axis][name], points_of(axis), strict=True):
                with ProcessPoolExecutor(1, mp_context=context) as pool:
                    kept["calls"] = pool.submit(count, name, point).result()
                print(name, point, kept["calls"], flush=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
