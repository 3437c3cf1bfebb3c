"""Where do my initial weights come from? From each rank: nothing is sent at the beginning.

Every rank cuts its own rows out of its own weights. If the ranks were seeded differently, or only one of them has read
a checkpoint, the whole is a patchwork of several models. It trains, and badly, and no shape is wrong.

With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the ranks compare a checksum of each parameter before it is cut, and a warning
names those that differ. To make them equal, load them on rank 0 and send them, ``set_model_state_dict`` with
``StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)``, or seed all ranks equally before building.

*In torch:* no check.

Spec: NEW-20.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from minifsdp.engine import collectives
from minifsdp.engine.dtensors import Sharding
from minifsdp.engine.layout import OwnedParameter
from minifsdp.engine.mesh import Mesh
from minifsdp.engine.messages import message, warn


def warn_if_different(
    parameters: dict[nn.Parameter, OwnedParameter], shardings: Sequence[Sharding], device: torch.device
) -> None:
    """While debugging, warns of parameters whose values differ between ranks. Every rank of the meshes must call it.

    Args:
        parameters: which are about to be cut.
        shardings: how.
        device: where to compare.
    """
    if get_debug_level() != DebugLevel.DETAIL:
        return
    for table in dict.fromkeys(sharding.table for sharding in shardings):
        real = {
            owned.path: sharding.local_of(parameter)
            for (parameter, owned), sharding in zip(parameters.items(), shardings, strict=True)
            if sharding.table == table and not parameter.is_meta and parameter.is_floating_point()
        }
        if real:
            _compare(real, table, device)


def _compare(values: dict[str, torch.Tensor], table: Mesh, device: torch.device) -> None:
    # What tensor parallelism has cut differs from part to part; compared are ranks that have the same part.
    sums = [_checksum(value) for value in values.values()]
    mine = torch.tensor(sums, dtype=torch.float64, device=device)
    different = torch.zeros(len(sums), dtype=torch.bool, device=device)
    for group in (table.shard, table.replicate):
        if group is not None:
            everybody = mine.new_empty(group.size * len(sums))
            collectives.gather(group, everybody, mine).wait()
            different |= (everybody.view(group.size, -1) != mine).any(dim=0)
    names = [path for path, differs in zip(values, different.tolist(), strict=True) if differs]
    if names:
        warn(message("initial-values-differ", names=names))


def _checksum(values: torch.Tensor) -> float:
    # A sum alone would not see two values exchanged, so each is weighted by its place.
    row = values.reshape(-1).to(torch.float64)
    return float(torch.dot(row, torch.arange(1, row.numel() + 1, dtype=torch.float64, device=row.device)))
