"""Reading an optimizer's state: from original parameters by name to this rank's shards, under numbers.

The way back of ``optim_state.py``. What comes out is what ``optim.load_state_dict`` accepts on this rank, for any
number of ranks, any wrapping, and flat or original parameters: names are all that a checkpoint and an optimizer must
have in common.

Worked example, the unit of the other page, read on rank 1 of two, whose piece is ``w b b b .``::

    given     {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}
    flat      {0: {"step": 1, "exp_avg": [w b b b .]}}                           padding is filled with 0
    original  {0: {"step": 1, "exp_avg": [w]}, 1: {"step": 1, "exp_avg": [b b b]}}

1. *Check.* Everything is compared with the optimizer before anything is made of it: names, shapes, types, the values
   that a flat parameter can have only once. Whoever finds something tells the others, and all refuse together. Then
   everybody knows what states there are (see ``optim_state_facts.py``), from its own dict or from the first rank.
2. *Pieces.* One state of one unit at a time. Three sources:

   * everybody has everything: each rank cuts out its own part, nothing is sent;
   * only the first rank has it (``rank0_only``): it lays out the unit's row and *scatters* the pieces, so that no other
     rank ever sees more than its own;
   * everybody has rows: they are gathered for one parameter at a time, and cut again in the other direction.
3. *Keys.* Numbers, counted over the optimizer's own groups, or names for optimizers that are keyed so.

What is missing? A parameter may be without a state because it never had a gradient. If no parameter of its unit has
one, that is what it looks like, and the unit starts afresh. If others have one, the dict is more likely to be damaged;
who means it says so with an empty entry, ``optim_state_dict["state"][name] = {}``, and gets zeros in a flat parameter.

*In torch:* ``_flatten_optim_state_dict`` and ``_rekey_sharded_optim_state_dict``; what only the first rank has is
broadcast whole, and a dict that does not fit is refused by whoever notices.

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
from minifsdp.engine.mesh import Mesh
from minifsdp.engine.messages import detail, message

T = TypeVar("T")


@torch.no_grad()
@chunks.unadvised()
def read(target: Target, given: Any, *, talks: bool = True) -> dict[str, Any]:
    """What the optimizer's ``load_state_dict`` accepts on this rank. All ranks of the model's groups must call it.

    Args:
        target: the optimizer and its model.
        given: the state by original names; anything on a rank whose dict is not read.
        talks: whether ranks agree on a refusal; if not, nothing is sent at all, and each refuses on its own.

    Raises:
        StateDictMismatchError: the dict does not fit the model or the optimizer, or the optimizer not the model; if
            ranks talk, on all of them.
        ValueError: there is no unit in the model.
    """
    names, first_only = target.names, target.form.first_only
    if not names.units:
        raise ValueError(message("optimizer-without-fsdp", type=type(target.model).__name__))
    groups = agreement.groups_of(unit.mesh for unit in names.units) if talks else []
    agreement.monitored_barrier(groups, "optim_state_dict_to_load()")
    mesh = names.units[0].mesh
    # An empty dict fits everywhere.
    source = given if not first_only or mesh.is_first else {"state": {}}
    agreement.refuse_together(groups, names.unknown(parameters_of(target.groups)) or check(source, target))
    if target.form.is_sharded:
        # They are gathered one by one, so each rank must have them, and of one dtype.
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


# ---- 1. what everybody knows ----------------------------------------------------------------------------------------


def _outline(given: Mapping[str, Any], names: ParameterNames) -> tuple[list[Facts], dict[str, Any], Any]:
    """The dict without the elements of units' states: facts by unit, all other entries, the groups if it has any."""
    in_units = {name for unit in names.units for name in unit.names}
    rest = {name: entries for name, entries in given["state"].items() if name not in in_units}
    return facts_given(names, given["state"]), rest, given.get("param_groups")


def _broadcast(value: T, mesh: Mesh) -> T:
    """The first rank's value. First to its replicas, then to their shard groups, so that it reaches everybody."""
    box = [value]
    for group in (mesh.replicate, mesh.shard):
        if group is not None:
            collectives.call(dist.broadcast_object_list, group, box, group.ranks[0])
    return box[0]


# ---- 2. pieces ------------------------------------------------------------------------------------------------------


class _Reading:
    """One unit's part of a checked dict, taken apart.

    Args:
        unit: whose parameters.
        facts: what there is of their states; the same on all ranks that tensors are sent between.
        values: entries by name, where this rank has them.
        target: for which they are.
    """

    def __init__(self, unit: UnitNames, facts: Facts, values: Mapping[str, Any], target: Target) -> None:
        self.unit, self.facts, self.values, self.target = unit, facts, values, target

    def states(self) -> dict[Any, dict[str, Any]]:
        """What is to be loaded, by the optimizer's keys. All ranks of the unit's mesh must call it: they send."""
        result: dict[Any, dict[str, Any]] = {}
        for number, entries in each_state(self.facts, self._values).items():
            owner = self.unit.owners[number]
            if entries and owner in self.target.keys and self._is_kept(number):
                # All parameters behind a flat one have the same.
                result.setdefault(self.target.keys[owner], entries)
        return result

    def _is_kept(self, number: int) -> bool:
        # An optimizer makes no state for a slice of nothing, as it never has a gradient; one that is keyed by names
        # wants an entry for every name.
        unit = self.unit
        return unit.is_flat or unit.keeps_shapes or self.target.by_name or unit.is_here(number)

    def _values(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        unit = self.unit
        if unit.keeps_shapes:
            return {number: self._whole(number, key) for number in numbers}
        piece = self._piece(key, dtype, numbers)
        return {number: piece if unit.is_flat else piece[unit.places[number]].clone() for number in numbers}

    def _whole(self, number: int, key: str) -> torch.Tensor:
        unit, fact = self.unit, self.facts[number][key]
        value = self.values.get(unit.names[number], {}).get(key)
        if self.target.form.first_only:
            shape = fact.shape if isinstance(fact, Shaped) else unit.shapes[number]
            value = _from_first(unit.mesh, value, torch.empty(shape, dtype=fact.dtype, device=unit.layout.device))
        return unit.whole(value).to(unit.layout.local_values().device, copy=True)

    def _piece(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> torch.Tensor:
        unit = self.unit
        piece = torch.zeros_like(unit.layout.local_values(), dtype=dtype)
        if self.target.form.first_only:
            mine = _from_first(unit.mesh, self._row(key, dtype, numbers), piece.to(unit.layout.device))
            return mine.to(piece.device)
        for number in numbers:
            unit.lay(unit.whole(self.values[unit.names[number]][key]), number, piece)
        return piece

    def _row(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> torch.Tensor | None:
        """The pieces of all ranks, one after the other; ``None`` if this is not the first rank."""
        if not self.unit.mesh.is_first:
            return None
        row = self.unit.empty_row(dtype)[0].zero_()
        views = self.unit.layout.views_of(row)
        for number in numbers:
            views[number].copy_(self.values[self.unit.names[number]][key])
        return row


def _from_first(mesh: Mesh, whole: torch.Tensor | None, mine: torch.Tensor) -> torch.Tensor:
    """Fills ``mine`` from the first rank's ``whole``: scattered over its shard group, then sent to replicas."""
    if mesh.shard is None:
        if whole is not None:
            mine.copy_(whole)
    elif mesh.replicate is None or mesh.replicate.rank == 0:
        pieces = None if whole is None else list(whole.chunk(mesh.shard.size))
        collectives.call(dist.scatter, mesh.shard, mine, pieces, mesh.shard.ranks[0])
    if mesh.replicate is not None:
        collectives.call(dist.broadcast, mesh.replicate, mine, mesh.replicate.ranks[0])
    return mine


# ---- 3. keys --------------------------------------------------------------------------------------------------------


def _rest(rest: Mapping[Any, Any], target: Target) -> dict[Any, Any]:
    """Parameters outside of all units, and keys of the user's own: as they are."""
    names = target.names
    found = {key: copy.deepcopy(value) for key, value in rest.items() if key not in names.owners}
    # In the order of the model and not of the optimizer, which may be another one on another rank.
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
