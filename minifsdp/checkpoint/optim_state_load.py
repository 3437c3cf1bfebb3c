"""Loading the optimizer's state: from original parameters by name to this rank's shards, under numbers.

The reverse of ``optim_state.py``. The result is accepted by ``optim.load_state_dict`` on this rank, for any number of
ranks, any wrapping, and flat or original parameters. The checkpoint and the optimizer only need the same parameter
names.

Worked example, the unit of ``optim_state.py``, loaded on rank 1 of two, whose local shard is ``w b b b .``::

    given     {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}
    flat      {0: {"step": 1, "exp_avg": [w b b b .]}}                           padding is filled with 0
    original  {0: {"step": 1, "exp_avg": [w]}, 1: {"step": 1, "exp_avg": [b b b]}}

1. *Check.* The dict is compared with the optimizer before it is used: names, shapes, types, and the values that a flat
   parameter can have only once. If any rank finds a problem, all ranks raise. After that all ranks have the facts
   about the states (see ``optim_state_facts.py``), from their own dict or from the first rank.
2. *Local shards.* One state of one unit at a time. Three sources:

   * all ranks have full values: each rank copies its own shard, and nothing is communicated;
   * only the first rank has them (``rank0_only``): it fills the unit's bucket and *scatters* the shards, so that no
     other rank receives more than its own shard;
   * all ranks have rows: they are all-gathered for one parameter at a time, and each rank copies its own shard.
3. *Keys.* Numbers, counted over the optimizer's own groups, or names for optimizers that use names as keys.

Missing states: a parameter may have no state because it never had a gradient. If no parameter of its unit has a state,
this is assumed, and the unit starts without states. If others have one, the dict is more likely damaged. To confirm
that it is intended, add an empty entry, ``optim_state_dict["state"][name] = {}``; a flat parameter then gets zeros.

*In torch:* ``_flatten_optim_state_dict`` and ``_rekey_sharded_optim_state_dict``. A dict that only the first rank has
is broadcast in full, and only the rank that notices a problem raises.

Spec: OSD-LOAD-01 to OSD-LOAD-08.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from minifsdp.checkpoint import agreement, chunks
from minifsdp.checkpoint.optim_state_check import Target, check
from minifsdp.checkpoint.optim_state_facts import Facts, Shaped, copied, each_state, facts_given, tensors_in
from minifsdp.checkpoint.optim_state_names import ParameterNames, UnitNames, parameters_of, regrouped
from minifsdp.engine import collectives
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import detail, message

T = TypeVar("T")


@torch.no_grad()
@chunks.unadvised()
def read(target: Target, given: Any, *, talks: bool = True) -> dict[str, Any]:
    """The dict for the optimizer's ``load_state_dict`` on this rank. All ranks of the model's groups must call it.

    Args:
        target: the optimizer and its model.
        given: the state by original names; ignored on a rank whose dict is not read.
        talks: whether ranks check the dict together; if False, nothing is communicated, and each rank checks alone.

    Raises:
        StateDictMismatchError: the dict does not fit the model or the optimizer, or the optimizer does not fit the
            model; on all ranks if ``talks``.
        ValueError: there is no unit in the model.
    """
    names, first_only = target.names, target.form.first_only
    if not names.units:
        raise ValueError(message("optimizer-without-fsdp", type=type(target.model).__name__))
    groups = agreement.groups_of(unit.mesh for unit in names.units) if talks else []
    agreement.monitored_barrier(groups, "optim_state_dict_to_load()")
    mesh = names.units[0].mesh
    # An empty dict fits any optimizer.
    source = given if not first_only or mesh.is_first else {"state": {}}
    agreement.refuse_together(groups, names.unknown(parameters_of(target.groups)) or check(source, target))
    if target.form.is_sharded:
        # They are all-gathered one by one, so each rank must have them, with the same dtype.
        tensors = tensors_in(source["state"], names)
        rows = [(name, key, tensor.dtype) for name, key, tensor in tensors if chunks.local_rows(tensor) is not None]
        agreement.refuse_lacking(groups, (detail("rows-lacking", name=n, key=k, dtype=d) for n, k, d in rows))
    outline = _outline(source, names)
    by_unit, rest, given_groups = _broadcast(outline, mesh) if first_only else outline
    state: dict[Any, Any] = {}
    for unit, facts in zip(names.units, by_unit, strict=True):
        state.update(_Reading(unit, facts, source["state"], target).states())
    state.update(_rest(rest, target))
    if given_groups is None:
        return {"state": state}
    return {"state": state, "param_groups": _numbered_groups(given_groups, target)}


# ---- 1. facts that all ranks need -----------------------------------------------------------------------------------


def _outline(given: Mapping[str, Any], names: ParameterNames) -> tuple[list[Facts], dict[str, Any], Any]:
    """The dict without the elements of units' states: facts by unit, all other entries, and the groups, if any."""
    in_units = {name for unit in names.units for name in unit.names}
    rest = {name: entries for name, entries in given["state"].items() if name not in in_units}
    return facts_given(names, given["state"]), rest, given.get("param_groups")


def _broadcast(value: T, mesh: MeshGroups) -> T:
    """The first rank's value. It is broadcast to the first rank's replicas, and then in each of their shard groups."""
    box = [value]
    for group in (mesh.replicate, mesh.shard):
        if group is not None:
            collectives.call(dist.broadcast_object_list, group, box, group.ranks[0])
    return box[0]


# ---- 2. local shards ------------------------------------------------------------------------------------------------


class _Reading:
    """Converts one unit's states of a checked dict.

    Args:
        unit: the unit.
        facts: the facts about its states; the same on all ranks that exchange tensors.
        values: entries by name; empty on a rank whose dict is not read.
        target: the optimizer and its model.
    """

    def __init__(self, unit: UnitNames, facts: Facts, values: Mapping[str, Any], target: Target) -> None:
        self.unit, self.facts, self.values, self.target = unit, facts, values, target

    def states(self) -> dict[Any, dict[str, Any]]:
        """The states to load, by the optimizer's keys. Communicates: all ranks of the unit's mesh must call it."""
        result: dict[Any, dict[str, Any]] = {}
        for number, entries in each_state(self.facts, self._values).items():
            owner = self.unit.owners[number]
            if entries and owner in self.target.keys and self._is_kept(number):
                # All parameters in a flat one have the same entries.
                result.setdefault(self.target.keys[owner], entries)
        return result

    def _is_kept(self, number: int) -> bool:
        # An optimizer creates no state for an empty shard, which never has a gradient. An optimizer that is keyed by
        # names expects an entry for every name.
        unit = self.unit
        return unit.is_flat or unit.keeps_shapes or self.target.by_name or unit.is_here(number)

    def _values(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        unit = self.unit
        if unit.keeps_shapes:
            return {number: self._whole(number, key) for number in numbers}
        local_shard = self._local_shard(key, dtype, numbers)
        return {number: local_shard if unit.is_flat else local_shard[unit.places[number]].clone() for number in numbers}

    def _whole(self, number: int, key: str) -> torch.Tensor:
        unit, fact = self.unit, self.facts[number][key]
        value = self.values.get(unit.names[number], {}).get(key)
        if self.target.form.first_only:
            shape = fact.shape if isinstance(fact, Shaped) else unit.shapes[number]
            value = _from_first(unit.mesh, value, torch.empty(shape, dtype=fact.dtype, device=unit.layout.device))
        return unit.whole(value).to(unit.layout.local_values().device, copy=True)

    def _local_shard(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> torch.Tensor:
        unit = self.unit
        local_shard = torch.zeros_like(unit.layout.local_values(), dtype=dtype)
        if self.target.form.first_only:
            mine = _from_first(unit.mesh, self._row(key, dtype, numbers), local_shard.to(unit.layout.device))
            return mine.to(local_shard.device)
        for number in numbers:
            unit.lay(unit.whole(self.values[unit.names[number]][key]), number, local_shard)
        return local_shard

    def _row(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> torch.Tensor | None:
        """The shards of all ranks, concatenated; ``None`` if this is not the first rank."""
        if not self.unit.mesh.is_first:
            return None
        row = self.unit.empty_row(dtype)[0].zero_()
        views = self.unit.layout.views_of(row)
        for number in numbers:
            views[number].copy_(self.values[self.unit.names[number]][key])
        return row


def _from_first(mesh: MeshGroups, whole: torch.Tensor | None, mine: torch.Tensor) -> torch.Tensor:
    """Fills ``mine`` from the first rank's ``whole``: a scatter over its shard group, then a broadcast to replicas."""
    if mesh.shard is None:
        if whole is not None:
            mine.copy_(whole)
    elif mesh.replicate is None or mesh.replicate.rank == 0:
        local_shards = None if whole is None else list(whole.chunk(mesh.shard.size))
        collectives.call(dist.scatter, mesh.shard, mine, local_shards, mesh.shard.ranks[0])
    if mesh.replicate is not None:
        collectives.call(dist.broadcast, mesh.replicate, mine, mesh.replicate.ranks[0])
    return mine


# ---- 3. keys --------------------------------------------------------------------------------------------------------


def _rest(rest: Mapping[Any, Any], target: Target) -> dict[Any, Any]:
    """Parameters outside of all units, and custom keys of the user: copied unchanged."""
    names = target.names
    found = {key: copy.deepcopy(value) for key, value in rest.items() if key not in names.owners}
    # In the order of the model, because the order of the optimizer may differ between ranks.
    for parameter, name in names.outside.items():
        if parameter in target.keys and name in rest:
            found[target.keys[parameter]] = {key: _plain(value, names.units[0]) for key, value in rest[name].items()}
    return found


def _plain(value: Any, unit: UnitNames) -> Any:
    # The parameter may have been in a unit when the dict was written.
    return copied(value) if chunks.local_rows(value) is None else unit.whole(value)


def _numbered_groups(given: Sequence[Mapping[str, Any]], target: Target) -> list[dict[str, Any]]:
    """The optimizer's own groups, with the settings of the given ones."""
    names = target.names
    group_of = {name: group for group in given for name in group["params"]}
    groups = []
    for index, own in enumerate(target.groups):
        known = [parameter for parameter in own["params"] if any(name in group_of for name in names.of[parameter])]
        found = [name for name in names.behind(known) if name in group_of]
        source = group_of[found[0]] if found else given[index] if index < len(given) else own
        groups.append(regrouped(source, [target.keys[parameter] for parameter in known], own.get("param_names")))
    return groups
