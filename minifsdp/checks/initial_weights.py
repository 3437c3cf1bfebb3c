"""Compares the initial weights of all ranks. ``fully_shard`` itself does not broadcast initial weights.

Every rank takes its shard from its own weights. If a rank uses another seed, or has not read the checkpoint, all shapes
are correct and no error is raised. The model then consists of shards of different models, or its replicas differ and
never become equal. It trains, but badly.

So before the parameters of a unit are sharded, each rank computes a checksum of each parameter. The checksums are
compared among all ranks of the mesh, over the shard group and the replicate group::

    rank 0    weight 8215    bias 77
    rank 1    weight 8215    bias 77
    rank 2    weight 8215    bias 31        on every rank: "parameter 'bias': rank(s) 2 differ from rank 0"

The checksum treats the bits as integers, with a weight for each position. So it does not depend on the order of the
sum, it detects two exchanged values, and equal ``nan`` match. A difference causes a warning and not an error, because
ranks may differ on purpose until rank 0's values are loaded on all: with ``set_model_state_dict`` and
``StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)``, or with ``sync_module_states=True``.

``fully_shard`` compares with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. The debug check ``weights`` compares for both APIs.

Cost: three tensors of 64-bit integers of the parameter's size, one parameter at a time, and a few bytes to send.

*In torch:* no check.

Spec: NEW-20, DEBUG-04.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed import DebugLevel, get_debug_level

from minifsdp.checks.details import detail, some
from minifsdp.engine.exchange import exchange, groups_of
from minifsdp.engine.layout import ParamInfo
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, warn
from minifsdp.engine.sharded_param import ShardedParam
from minifsdp.engine.shards import local_tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_while_debugging(params: Sequence[ShardedParam]) -> None:
    """`compare_sharded` at torch's debug level DETAIL."""
    if get_debug_level() == DebugLevel.DETAIL:
        compare_sharded(params)


def compare_sharded(params: Sequence[ShardedParam]) -> None:
    """Compares parameters that are about to be sharded. Every rank of their meshes must call it."""
    for mesh in dict.fromkeys(param.mesh_groups for param in params):
        compare(
            "the module",
            [
                (param.parameter, param.info)
                for param in params
                if param.mesh_groups == mesh
            ],
            mesh,
        )


def compare(
    unit: str, parameters: Iterable[tuple[nn.Parameter, ParamInfo]], mesh: MeshGroups
) -> None:
    """Issues a warning if values of parameters differ between ranks. Every rank of the mesh must call it.

    Args:
        unit: the unit of the parameters, for the message.
        parameters: the original parameters. For a DTensor, its local tensors are compared.
        mesh: the ranks that must have equal values.
    """
    mine = {
        info.path: _checksum_of_bits(local_tensor(p.detach()))
        for p, info in parameters
        if not p.is_meta
    }
    all_ranks = exchange(groups_of([mesh]), mine)
    first = min(all_ranks)
    differing = {
        path: [
            str(rank)
            for rank, of_rank in all_ranks.items()
            if of_rank.get(path) != number
        ]
        for path, number in all_ranks[first].items()
    }
    if lines := [
        detail("rank-differs", path=path, ranks=some(ranks), first=first)
        for path, ranks in differing.items()
        if ranks
    ]:
        warn(message("initial-weights-differ", unit=unit, lines="; ".join(lines)))


def _checksum_of_bits(values: torch.Tensor) -> int:
    if hasattr(values, "__tensor_flatten__") or values.element_size() not in _INTEGERS:
        # The bits are in inner tensors, or there is no integer dtype of that size.
        return 0
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()]).to(torch.int64)
    # Odd weights, because an even weight would drop the highest bit.
    places = torch.arange(1, 2 * len(bits), 2, dtype=torch.int64, device=bits.device)
    return int((bits * places).sum())
