"""Sharding with either API: the wrapper, or ``fully_shard`` in place. The groups and meshes of four ranks.

::

    wrapped()     FullyShardedDataParallel: each block is a unit, the rest belongs to the root
    sharded()     fully_shard: the same units
    as_torch()    torch's own wrapper: the same units
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_policies
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spec_tests.harness import device, kept
from spec_tests.models.modules import MLP, Block, seeded
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, fully_shard

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy
FLAT_STRATEGIES = (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)
HYBRID_STRATEGIES = (HYBRID_SHARD, HYBRID_SHARD_ZERO2)


def wrapped(model: nn.Module | None = None, **options: Any) -> FullyShardedDataParallel:
    """Wraps each block as a unit; the rest belongs to the root. Hybrid strategies use the groups of a 2 x 2 `grid`."""
    if options.get("sharding_strategy") in HYBRID_STRATEGIES:
        options.setdefault("process_group", grid())
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block, MLP}))
    return FullyShardedDataParallel(seeded() if model is None else model, **options)


def sharded(model: nn.Module | None = None, *, blocks: Iterable[int] = range(4), **options: Any) -> Any:
    """Shards each block as a unit; the rest belongs to the root. Works in place and returns the model."""
    model = seeded() if model is None else model
    for index in blocks:
        fully_shard(model.blocks[index], **options)
    return fully_shard(model, **options)


def as_torch(model: nn.Module, **options: Any) -> torch_fsdp.FullyShardedDataParallel:
    """The second oracle: the same model in torch's own wrapper, with the same units."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = torch_policies.ModuleWrapPolicy({Block, MLP})
        return torch_fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device(), **options)


def grid() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Four ranks. Shard groups: 0 and 1, 2 and 3. Replicate groups: 0 and 2, 1 and 3."""
    assert dist.get_world_size() == 4, f"a grid of 2 x 2 needs 4 ranks, there are {dist.get_world_size()}"
    return kept("grid", _make_grid)


def _make_grid() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    rows, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    columns, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    all_connected()
    return rows, columns


def line_mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (dist.get_world_size(),))


def grid_mesh() -> DeviceMesh:
    """Four ranks. Shard groups: 0 and 1, 2 and 3. Replicate groups: 0 and 2, 1 and 3."""
    return _mesh_with_replicas(2, 2)


def column_mesh() -> DeviceMesh:
    """All ranks are replicas, and each one stores the unsharded parameters."""
    return _mesh_with_replicas(dist.get_world_size(), 1)


def _mesh_with_replicas(*sizes: int) -> DeviceMesh:
    def make() -> DeviceMesh:
        mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("replicate", "shard"))
        all_connected()
        return mesh

    return kept(("mesh", sizes), make)


def all_connected() -> None:
    """Call this after creating new groups. A rank whose test ends closes its groups. If another rank is still
    connecting to it at that time, that rank fails.
    """
    dist.all_reduce(torch.zeros(1, device=device()))
