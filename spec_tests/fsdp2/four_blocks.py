"""Four equal blocks inside a root with parameters of its own, sharded in place.

The model, its batches and the words for what was recorded are those of the wrapper's tests::

    AGR AG0 F0 FREE0 AG1 F1 FREE1 ... keepR | AG1 B1 AG0 FREE1 RS1 ...

so the two front doors can be held against each other line by line. Whole values come from ``full_tensor()``, which is
``DTensor``'s own and knows nothing of the units.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from minifsdp import trace
from spec_tests.fsdp1.four_blocks import (
    UNITS,
    WIDTH,
    Block,
    Stack,
    Watch,
    WideBlock,
    Wire,
    all_connected,
    assert_same,
    batch,
    iterate,
    local_gradients,
    loss_of,
    mean_gradients,
    named,
    of_unit,
    said,
    seeded,
)
from spec_tests.fsdp2.subject import fully_shard
from spec_tests.harness import device, kept

__all__ = [
    "SIZES",
    "UNITS",
    "WIDTH",
    "Block",
    "Stack",
    "Watch",
    "WideBlock",
    "Wire",
    "all_connected",
    "assert_same",
    "batch",
    "column_mesh",
    "full",
    "full_gradients",
    "full_values",
    "grid_mesh",
    "iterate",
    "line_mesh",
    "local_gradients",
    "loss_of",
    "mean_gradients",
    "named",
    "of_unit",
    "recorded_iteration",
    "said",
    "seeded",
    "sharded",
    "wide",
]

SIZES = (2, 4, 6, 8)


def sharded(model: nn.Module | None = None, *, blocks: Iterable[int] = range(4), **options: Any) -> Any:
    """Each block a unit, the rest the root's; in place, and returned."""
    model = seeded() if model is None else model
    for index in blocks:
        fully_shard(model.blocks[index], **options)
    return fully_shard(model, **options)


def wide() -> nn.Module:
    """Blocks of different sizes, so that a number of elements says whose collective it is."""
    return seeded(lambda: Stack(hidden=SIZES))


def line_mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (dist.get_world_size(),))


def grid_mesh() -> DeviceMesh:
    """Four ranks: 0 and 1 shard, 2 and 3 shard; 0 and 2 are replicas, 1 and 3 are replicas."""
    return _mesh_with_replicas(2, 2)


def column_mesh() -> DeviceMesh:
    """All ranks are replicas, and each has the whole."""
    return _mesh_with_replicas(dist.get_world_size(), 1)


def _mesh_with_replicas(*sizes: int) -> DeviceMesh:
    def make() -> DeviceMesh:
        mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("replicate", "shard"))
        all_connected()
        return mesh

    return kept(("mesh", sizes), make)


def recorded_iteration(model: nn.Module, step: int = 0, **arguments: Any) -> str:
    """Forward and backward, in words, with a bar in between and ``keepR`` where the root stays gathered."""
    with trace.record() as forward:
        loss = loss_of(model(batch(step), **arguments))
    with trace.record() as backward:
        loss.backward()
    keeps = " keepR" if "AGR" in said(forward.events) and "FREER" not in said(forward.events) else ""
    return f"{said(forward.events)}{keeps} | {said(backward.events)}"


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor; every rank of its mesh must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters by name."""
    with torch.no_grad():
        return {name: full(parameter).clone() for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradients by name, of the parameters that have one."""
    return {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
