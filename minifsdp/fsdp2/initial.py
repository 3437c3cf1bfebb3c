"""Checks that all ranks start with the same weights. ``fully_shard`` itself does not broadcast initial weights.

Every rank takes its shard from its own weights. If the ranks use different seeds, or only one of them has loaded a
checkpoint, the unsharded model is a mix of several models. It trains poorly, and no error reports the mistake.

With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, the ranks compare a checksum of each parameter before sharding, and a warning
lists the parameters that differ. To make them equal, load the weights on rank 0 and call ``set_model_state_dict`` with
``StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)``, or set the same seed on all ranks.

*In torch:* no check.

Spec: NEW-20.
"""

from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from minifsdp.engine import collectives
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, warn
from minifsdp.engine.sharded_param import ShardedParam
from minifsdp.engine.shards import local_tensor


def warn_if_different(params: Sequence[ShardedParam], device: torch.device) -> None:
    """Warns about parameters that differ between ranks, at debug level DETAIL. Every rank of the meshes must call it.

    Args:
        params: the parameters that are about to be sharded.
        device: the device to compare on.
    """
    if get_debug_level() != DebugLevel.DETAIL:
        return
    for groups in dict.fromkeys(param.mesh_groups for param in params):
        real = {
            param.info.path: local_tensor(param.parameter.detach())
            for param in params
            if param.mesh_groups == groups and not param.parameter.is_meta and param.parameter.is_floating_point()
        }
        if real:
            _compare(real, groups, device)


def _compare(values: dict[str, torch.Tensor], groups: MeshGroups, device: torch.device) -> None:
    # Tensor-parallel shards differ between ranks by design, so compare only ranks that hold the same shard.
    sums = [_checksum(value) for value in values.values()]
    mine = torch.tensor(sums, dtype=torch.float64, device=device)
    different = torch.zeros(len(sums), dtype=torch.bool, device=device)
    for group in (groups.shard, groups.replicate):
        if group is not None:
            everybody = mine.new_empty(group.size * len(sums))
            collectives.all_gather(group, everybody, mine).wait()
            different |= (everybody.view(group.size, -1) != mine).any(dim=0)
    names = [path for path, differs in zip(values, different.tolist(), strict=True) if differs]
    if names:
        warn(message("initial-values-differ", names=names))


def _checksum(values: torch.Tensor) -> float:
    # A plain sum does not detect two swapped values, so each value is weighted by its position.
    row = values.reshape(-1).to(torch.float64)
    return float(torch.dot(row, torch.arange(1, row.numel() + 1, dtype=torch.float64, device=row.device)))
