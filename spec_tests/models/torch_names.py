"""Names of torch that differ between the versions 2.11 to 2.15, for tests that compare with torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

__all__ = ["IS_2_15", "ShardPlacementResult", "all_gather_single", "param_groups", "reduce_scatter_single"]

IS_2_15 = torch.__version__ >= "2.15"

# The names since 2.13; earlier versions have only the other ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

if TYPE_CHECKING or hasattr(_fsdp_common, "ShardPlacementResult"):
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
else:

    @dataclass
    class ShardPlacementResult:
        """The class that torch has since 2.12."""

        placement: Shard | None
        mesh_info: Any


def param_groups(state: Any) -> list[Any]:
    """The parameter groups of a module that ``fully_shard`` of any version of torch has sharded. 2.11 has one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]
