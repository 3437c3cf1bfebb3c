"""Buckets for the tests of the per-parameter layout, and a layout of one bucket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from minifsdp.engine.bucket import Bucket
from minifsdp.engine.layout import Steps
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.shards import padded_shard_numel


def param(shape: torch.Size, dim: int, group: Group | None) -> Any:
    """The attributes of a `ShardedParam` that a bucket uses. A group of ``None`` means a single rank."""
    num = 1 if group is None else group.size
    return SimpleNamespace(
        shape=shape,
        dim=dim,
        num_shards=num,
        chunk_numel=padded_shard_numel(shape, dim, num),
        mesh_groups=MeshGroups(group, None),
        info=SimpleNamespace(module=None),
    )


class OneBucket(PerParameterLayout):
    """A layout that can only all-gather a bucket and wait for it."""

    def __init__(self, bucket: Bucket) -> None:
        self.buckets, self._handles, self.local_parameters, self.has_copied = [bucket], [], [], False
        self.steps = Steps()
