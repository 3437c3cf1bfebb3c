"""Keeps values that a forward has written into unsharded parameters.

Some modules change their own weights in forward: ``Embedding(max_norm=...)``, a codebook that moves, an initialization
from the first batch. The unsharded parameters are freed afterwards, so the change must go into the shards. Each rank
copies its part of its own unsharded tensor. This is correct only if all ranks have written the same values.

A layout detects a change by the version of its unsharded tensors, before it frees them. An all-gather does not increase
this version. Only after a change, the ranks compare a hash of the values, and the CPU waits for the result.

Worked example, two ranks, a codebook of 4 rows::

    all ranks have added 1            each rank copies its 2 rows into its shard
    each rank has added its mean      "parameter 'book' was changed in forward, and the values differ between ranks"

*In torch:* the changes are lost, without an error.

Spec: PROG-43, PROG-44.
"""

from collections.abc import Mapping

import torch

from minifsdp.engine import collectives
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message


def check_equal_changes(changed: Mapping[str, torch.Tensor], mesh: MeshGroups) -> None:
    """Checks that all ranks of ``mesh`` have written the same values. All of them must call it.

    Args:
        changed: the unsharded values of parameters that were changed, with the names of the parameters.
        mesh: the ranks to compare.

    Raises:
        RuntimeError: if the values differ, on every rank.
    """
    hashes = [
        torch.hash_tensor(value.detach()).view(torch.int64).to(torch.float64)
        for value in changed.values()
    ]
    mine = torch.stack(hashes)
    for group in (mesh.shard, mesh.replicate):
        if group is not None:
            all_ranks = mine.new_empty(group.size * len(hashes))
            collectives.all_gather(group, all_ranks, mine).wait()
            # A difference becomes nan, which the next group then finds as well.
            mine = torch.where(
                (all_ranks.view(group.size, -1) == mine).all(dim=0), mine, torch.nan
            )
    different = [
        name
        for name, is_nan in zip(changed, mine.isnan().tolist(), strict=True)
        if is_nan
    ]
    if different:
        raise RuntimeError(message("changed-in-forward", parameters=different))


def changed_values(mine: torch.Tensor, local_shard: torch.Tensor) -> torch.Tensor:
    """The new values of a local shard. Values that were not changed keep the precision of ``local_shard``.

    Args:
        mine: this rank's part of the unsharded values, in the compute dtype.
        local_shard: the local shard, in the stored dtype.
    """
    before = local_shard.to(mine.device)
    return torch.where(mine == before.to(mine.dtype), before, mine.to(before.dtype))
