"""A forward that writes to its own weights.

Some modules change their weights in forward: ``Embedding(max_norm=...)``, a codebook that moves, an initialization from
the first batch::

    class Codebook(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                self.book.add_(1)
            return x @ self.book

Without this case, the change is lost: the unsharded parameters are freed, and the shards keep the old values.

The case detects a change by the version of the unsharded tensors, before they are freed. An all-gather does not
increase this version. Each rank copies its part of its own unsharded tensor into its shard. This is correct only if all
ranks have written the same values. So only after a change, the ranks compare a hash of the values, and the CPU waits
for the result. Worked example, two ranks, a codebook of 4 rows::

    all ranks have added 1            each rank copies its 2 rows into its shard
    each rank has added its mean      "parameters ['book'] were changed in place while they were unsharded, ..."

*In torch:* the changes are lost, without an error.

Spec: PROG-43, PROG-44.
"""

from itertools import compress
from typing import Any

import torch

from minifsdp.engine import collectives
from minifsdp.engine.layout import full_name
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.root import RootState
from minifsdp.engine.shards import shard_of
from minifsdp.engine.unit import State, Unit


class WrittenWeights:
    """Copies changes into the shards before a unit is resharded, and when an outermost forward begins or ends.

    Args:
        root_state: the root of the units.
    """

    def __init__(self, root_state: RootState) -> None:
        self._units = root_state.units
        points = root_state.iteration.points
        points.unit_reshards.append(keep_changes)
        points.forward_begins.append(self._forward_begins)
        points.forward_ends.append(self._forward_ends)

    def _forward_begins(self) -> None:
        keep_changes(*self._units)

    def _forward_ends(self, output: Any) -> Any:
        keep_changes(*self._units)
        return output


def keep_changes(*units: Unit) -> None:
    """Copies values that were written to unsharded parameters into the shards. All ranks of the units must call it.

    Raises:
        RuntimeError: if the values differ between ranks, on every rank.
    """
    for unit in units:
        layout: Any = unit.layout
        if unit.state is State.SHARDED or layout.is_borrowed:
            continue
        if not layout.shards_are_dtensors:
            if layout.unsharded.leaf._version != layout.unsharded.version:
                _keep_flat(layout)
            continue
        for param in layout.params:
            if param.leaf._version != param.version:
                _keep_parameters(layout)
                break


def _keep_flat(layout: Any) -> None:
    unsharded = layout.unsharded
    unsharded.version = unsharded.leaf._version
    _check_equal([layout.name], [unsharded.alias], layout.mesh)
    part = unsharded.alias[layout.shard_range]
    layout.overwrite_local(_changed(part, layout.registered.shard.detach()))


def _keep_parameters(layout: PerParameterLayout) -> None:
    written = [param for param in layout.params if param.leaf._version != param.version]
    for param in written:
        param.version = param.leaf._version
    for groups in dict.fromkeys(param.mesh_groups for param in written):
        mine = [param for param in written if param.mesh_groups == groups]
        names = [full_name(layout.name, p.info.path) for p in mine]
        _check_equal(names, [p.plain_leaf for p in mine], groups)
        for p in mine:
            part = shard_of(p.plain_leaf.data, p.dim, p.num_shards, groups.shard_index)
            p.local_shard.copy_(_changed(part, p.local_shard))
            layout.has_copied = True


def _check_equal(
    names: list[str], changed: list[torch.Tensor], mesh: MeshGroups
) -> None:
    """Raises an error if the ranks of ``mesh`` have written different values. All of them must call it.

    Args:
        names: the names of the parameters that were changed. In a list of modules, two can have the same name.
        changed: their unsharded values.
        mesh: the ranks to compare.
    """
    mine = torch.stack([_fingerprint(value.detach()) for value in changed])
    for group in (mesh.shard, mesh.replicate):
        if group is not None:
            all_ranks = mine.new_empty(group.size * mine.numel())
            collectives.all_gather(group, all_ranks, mine.view(-1)).wait()
            # A difference becomes nan, which the next group then finds as well.
            is_same = (all_ranks.view(group.size, *mine.shape) == mine).all(dim=0)
            mine = torch.where(is_same, mine, torch.nan)
    is_different = mine.isnan().any(dim=1).tolist()
    different = list(compress(names, is_different))
    if different:
        raise RuntimeError(message("changed-in-forward", parameters=different))


def _fingerprint(value: torch.Tensor) -> torch.Tensor:
    """Two numbers: a hash, which equal changes of two elements do not change, and the sum, which they change."""
    bits = torch.hash_tensor(value).view(torch.int64).to(torch.float64)
    real = torch.view_as_real(value) if value.is_complex() else value
    total = real.sum(dtype=torch.float64).nan_to_num()
    return torch.stack([bits, total])


def _changed(mine: torch.Tensor, local_shard: torch.Tensor) -> torch.Tensor:
    """The new values of a local shard. Values that were not changed keep the precision of ``local_shard``.

    Args:
        mine: this rank's part of the unsharded values, in the compute dtype.
        local_shard: the local shard, in the stored dtype.
    """
    before = local_shard.to(mine.device)
    return torch.where(mine == before.to(mine.dtype), before, mine.to(before.dtype))
