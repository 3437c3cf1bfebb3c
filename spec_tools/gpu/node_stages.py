"""The work of each rank in the stages of ``nodes``. All ranks have a default process group, with a device each.

A stage is a function that yields findings. It calls ``mark`` before each step in which ranks wait for each other. If
ranks hang, the rank with the fewest marks is the one that the others wait for.
"""

from __future__ import annotations

import itertools
import platform as python_platform
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests.harness import device
from spec_tests.models.modules import MLP, Block, seeded
from spec_tests.models.sharding import sharded
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from spec_tools.gpu import bandwidth, collectives, smoke, steps
from spec_tools.gpu.platforms import CUDA, Platform

__all__ = ["NODE_STAGES", "NodeStage", "Place"]

Finding = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a rank is, from the variables of torchrun.

    Attributes:
        rank: the rank.
        num_ranks: ranks on all nodes.
        node: number of the machine, from 0.
        local_rank: rank on this machine, and index of the device.
        local_size: ranks on this machine.
    """

    rank: int
    num_ranks: int
    node: int
    local_rank: int
    local_size: int

    @property
    def name(self) -> str:
        """For messages, for instance ``rank 9 (node 1, local rank 1)``."""
        return f"rank {self.rank} (node {self.node}, local rank {self.local_rank})"


Mark = Callable[[str], None]
Body = Callable[[Platform, Place, Mark, bool], Iterator[Finding]]


@dataclass(frozen=True)
class NodeStage:
    """A name, the function that each rank runs, its limit in seconds, and whether a failure ends the run."""

    name: str
    body: Body
    limit: float
    is_vital: bool = False


def look(platform: Platform, place: Place, mark: Mark, quick: bool) -> Iterator[Finding]:
    """The versions and the device of this rank, after a first all-reduce."""
    mark("all-reduce")
    ones = torch.ones(1, device=device())
    dist.all_reduce(ones)
    assert int(ones) == place.num_ranks, f"the sum of {place.num_ranks} ones is {int(ones)}"
    name = torch.cuda.get_device_name() if platform is CUDA else f"device type {platform.device_type}"
    versions = {"Python": python_platform.python_version(), "torch": torch.__version__}
    if platform is CUDA:
        nccl: Any = torch.cuda.nccl
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version()))}
    where = {"rank": place.rank, "node": place.node, "local rank": place.local_rank, "host": socket.gethostname()}
    yield {**where, "device": name, "versions": versions}


def send(platform: Platform, place: Place, mark: Mark, quick: bool) -> Iterator[Finding]:
    """All-gather, reduce-scatter and all-reduce without minifsdp."""
    mark("all-gather, reduce-scatter and all-reduce")
    yield {"outcome": "passed", "ranks": place.num_ranks, "device": collectives.send()}


def train(platform: Platform, place: Place, mark: Mark, quick: bool) -> Iterator[Finding]:
    """Both APIs, and both with shards inside a node and replicas on the nodes, against a single process."""
    builds = dict(smoke.APIS)
    if place.num_ranks % place.local_size == 0:
        builds |= {
            "FullyShardedDataParallel, HYBRID_SHARD": lambda: _hybrid(place),
            "fully_shard, 2D mesh": lambda: _in_mesh(place),
        }
    for name, build in builds.items():
        mark(name)
        yield {"api": name, "ranks": place.num_ranks, "outcome": "passed", "distance": smoke.compare_model(name, build)}


def _mesh(place: Place) -> Any:
    sizes = (place.num_ranks // place.local_size, place.local_size)
    return init_device_mesh(device().type, sizes, mesh_dim_names=("replicate", "shard"))


def _hybrid(place: Place) -> nn.Module:
    wrapped: nn.Module = FullyShardedDataParallel(
        seeded(),
        device_mesh=_mesh(place),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block, MLP}),
        use_orig_params=True,
        device_id=device(),
    )
    return wrapped


def _in_mesh(place: Place) -> nn.Module:
    model: nn.Module = sharded(mesh=_mesh(place))
    return model


def measure_links(platform: Platform, place: Place, mark: Mark, quick: bool) -> Iterator[Finding]:
    """The bandwidth of all-gather and reduce-scatter over all ranks (``bandwidth.py``)."""
    mark("the cards of all ranks")
    cards = sorted({name for name, _ in _of_all_ranks(bandwidth.card(platform.name))})
    about = {"ranks": place.num_ranks, "card": ", ".join(cards), "shared": False}
    for collective, dtype in itertools.product(bandwidth.COLLECTIVES, bandwidth.DTYPES):
        mark(f"{collective} of {dtype}")
        sizes = bandwidth.plan(platform.largest, quick, getattr(torch, dtype))
        rows = bandwidth.measure(platform.name, collective, dtype, sizes, platform.largest, ranks_on_a_device=1)
        yield bandwidth.finding_of({**about, "collective": collective, "dtype": dtype}, _of_all_ranks(rows))


def _of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure_steps(platform: Platform, place: Place, mark: Mark, quick: bool) -> Iterator[Finding]:
    """Training steps of minifsdp and torch in bfloat16; the losses of all must agree."""
    for size in platform.sizes[:1] if quick else platform.sizes:
        expected: list[float] = []
        for contender in steps.CONTENDERS:
            mark(f"{contender}, {size}")
            turn = steps.train(platform.name, contender, size, "bf16")
            expected = expected or turn["losses"]
            figures = steps.joined([turn], torch.bfloat16, has_own_device=True)
            about = {"size": size, "ranks": place.num_ranks, "precision": "bf16", "contender": contender}
            yield steps.judged(about | figures, expected)


NODE_STAGES = (
    NodeStage("hardware", look, 180.0, is_vital=True),
    NodeStage("collectives", send, 180.0, is_vital=True),
    NodeStage("smoke", train, 300.0, is_vital=True),
    NodeStage("bandwidth", measure_links, 600.0),
    NodeStage("steps", measure_steps, 1200.0),
)
