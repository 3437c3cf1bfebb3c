"""Reading an optimizer's state: from original parameters by name to this rank's slices, under numbers.

The way back of ``optim_state.py``. What comes out is what ``optim.load_state_dict`` accepts on this rank, for any
number of ranks, any wrapping, and flat or original parameters: names are all that a checkpoint and an optimizer must
have in common.

Worked example, the unit of the other page, read on rank 1 of two, whose piece is ``w b b b .``::

    given     {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}
    flat      {0: {"step": 1, "exp_avg": [w b b b .]}}                           padding is filled with 0
    original  {0: {"step": 1, "exp_avg": [w]}, 1: {"step": 1, "exp_avg": [b b b]}}

1. *Check.* Everything is compared with the optimizer before anything is made of it: names, shapes, types, the values
   that a flat parameter can have only once. Whoever finds something tells the others, and all refuse together.
2. *Pieces.* One state of one unit at a time. Three sources:

   * everybody has everything: each rank cuts out its own part, nothing is sent;
   * only the first rank has it (``rank0_only``): it lays out the unit's row and *scatters* the pieces, so that no other
     rank ever sees more than its own;
   * everybody has rows: they are gathered for one parameter at a time, and cut again in the other direction.
3. *Keys.* Numbers, counted over the optimizer's own groups, or names for optimizers that are keyed so.

What is missing? A parameter may be without a state because it never had a gradient. If no parameter of its unit has
one, that is what it looks like, and the unit starts afresh. If others have one, the dict is more likely to be damaged;
who means it says so with an empty entry, ``optim_state_dict["state"][name] = {}``, and gets zeros in a flat parameter.

A value without dimensions is ambiguous for a parameter without dimensions: is it per element or meant for the whole?
The other parameters decide: what is a tensor with dimensions anywhere is per element.

*In torch:* ``_flatten_optim_state_dict`` and ``_rekey_sharded_optim_state_dict``; what only the first rank has is
broadcast whole, and a dict that does not fit is refused by whoever notices.

Spec: OSD-LOAD-01 to OSD-LOAD-08.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minifsdp.checkpoint import agreement, chunks
from minifsdp.checkpoint.codec import Form
from minifsdp.checkpoint.optim_state import copied
from minifsdp.checkpoint.optim_state_check import Expected, check, elementwise_keys
from minifsdp.checkpoint.optim_state_names import ParameterNames, UnitNames
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.messages import detail, message


@dataclass(frozen=True)
class Remote:
    """Stands for a tensor that only the first rank has."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@torch.no_grad()
@chunks.unadvised()
def read(
    model: nn.Module,
    groups_of_optimizer: Sequence[Mapping[str, Any]],
    given: Mapping[str, Any],
    form: Form,
    *,
    by_name: bool = False,
    own_keys: Sequence[Any] = (),
    is_lenient: bool = False,
    talks: bool = True,
) -> dict[str, Any]:
    """What the optimizer's ``load_state_dict`` accepts on this rank. All ranks of the model's groups must call it.

    Args:
        model: a wrapper, or a module with wrappers in it.
        groups_of_optimizer: the optimizer's own groups, with parameters under ``"params"``.
        given: the state by original names; read on the first rank only with ``form.first_only``.
        form: in which form it is.
        by_name: key the result by the names that parameters have in the wrapped model.
        own_keys: keys of the user's own that the optimizer's state has; they may be in ``given``, too.
        is_lenient: accept it if parameters outside of all units are not in the dict.
        talks: whether ranks agree on a refusal; if not, nothing is sent at all, and each refuses on its own.

    Raises:
        StateDictMismatchError: the dict does not fit the model or the optimizer, or the optimizer not the model; if
            ranks talk, on all of them.
        ValueError: there is no unit in the model.
    """
    names = ParameterNames(model)
    if not names.units:
        raise ValueError(message("optimizer-without-fsdp", type=type(model).__name__))
    is_source = not form.first_only or names.units[0].mesh.is_first
    expected = Expected(names, groups_of_optimizer, form.is_sharded, own_keys, is_lenient)
    groups = agreement.groups_of(unit.mesh for unit in names.units) if talks else []
    agreement.monitored_barrier(groups, "optim_state_dict_to_load()")
    _refuse_misfit(given if is_source else None, expected, groups)
    values: Mapping[str, Any] = given["state"] if is_source else {}
    outline = _outline(given if is_source else {}, names, form.first_only)
    if form.first_only:
        outline = _broadcast(outline, names.units[0].mesh)
    reading = _Reading(names, outline["state"], values, form.first_only, by_name)
    state: dict[Any, Any] = {}
    for unit in names.units:
        state.update(reading.unit_states(unit, groups_of_optimizer))
    state.update(reading.rest(groups_of_optimizer))
    if "param_groups" not in outline:
        return {"state": state}
    return {"state": state, "param_groups": _numbered_groups(outline["param_groups"], groups_of_optimizer, reading)}


# ---- 1. check -------------------------------------------------------------------------------------------------------


def _refuse_misfit(given: Mapping[str, Any] | None, expected: Expected, groups: Sequence[Group]) -> None:
    """Refuses together with everybody in ``groups``; a rank that is not asked for a dict has ``None``."""
    problems = expected.names.unknown(_parameters(expected.groups))
    if given is not None and not problems:
        problems = check(given, expected)
    agreement.refuse_together(groups, problems)
    if given is not None and expected.is_sharded:
        agreement.refuse_lacking(groups, _rows_in(given))


def _rows_in(given: Mapping[str, Any]) -> Iterable[str]:
    """Rows are gathered key by key: what is to be said of a rank that lacks them, or has them of another dtype."""
    for name, of in given["state"].items():
        for key, value in of.items() if isinstance(of, Mapping) else ():
            if chunks.local_rows(value) is not None:
                yield detail("rows-lacking", key=key, name=name, dtype=value.dtype)


# ---- 2. pieces ------------------------------------------------------------------------------------------------------


def _outline(given: Mapping[str, Any], names: ParameterNames, first_only: bool) -> dict[str, Any]:
    """The dict itself, or for other ranks the dict with place holders for the tensors of units."""
    if not first_only:
        return dict(given)
    in_units = {name for unit in names.units for name in unit.names}
    state = {
        name: {key: _remote(value) for key, value in entries.items()} if name in in_units else entries
        for name, entries in given.get("state", {}).items()
    }
    return {**{key: value for key, value in given.items() if key == "param_groups"}, "state": state}


def _remote(value: Any) -> Any:
    is_large = isinstance(value, torch.Tensor) and value.ndim > 0
    return Remote(value.shape, value.dtype) if is_large else value


def _broadcast(value: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The first rank's value. First down the columns, then along the rows, so that it reaches everybody."""
    box = [value]
    for group in (mesh.replicate, mesh.shard):
        if group is not None:
            dist.broadcast_object_list(box, src=group.ranks[0], group=group.process_group)
    return box[0]


class _Reading:
    """Takes a checked dict apart.

    Args:
        names: of the model.
        outline: entries by name; with `Remote` in place of what only the first rank has.
        values: entries by name, where this rank has them.
        first_only: whether tensors come from the first rank.
        by_name: whether the result is keyed by names.
    """

    def __init__(
        self,
        names: ParameterNames,
        outline: Mapping[str, Any],
        values: Mapping[str, Any],
        first_only: bool,
        by_name: bool,
    ) -> None:
        self.names, self.outline, self.values = names, outline, values
        self.first_only, self.by_name = first_only, by_name
        self.elementwise = elementwise_keys(outline, names.every_name)

    def key_of(self, parameter: nn.Parameter, number: int) -> Any:
        return self.names.current_names[parameter] if self.by_name else number

    def unit_states(self, unit: UnitNames, groups: Sequence[Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
        """What is to be loaded for the unit's owners, by key."""
        wanted = {parameter: number for number, parameter in enumerate(_parameters(groups))}
        # Of the unit's parameters those that have a state; all ranks go through them in the same order.
        entries = {n: self.outline[name] for n, name in enumerate(unit.names) if self.outline.get(name)}
        result: dict[Any, dict[str, Any]] = {}
        for key in dict.fromkeys(key for of_parameter in entries.values() for key in of_parameter):
            numbers = [number for number, of_parameter in entries.items() if key in of_parameter]
            cut = [number for number in numbers if self._is_cut(unit, number, key)]
            pieces: dict[int, torch.Tensor] = {}
            dtypes = {number: entries[number][key].dtype for number in cut}
            for dtype in dict.fromkeys(dtypes.values()):
                pieces |= self._pieces(unit, key, [number for number in cut if dtypes[number] is dtype])
            for owner, behind in unit.owners:
                mine = [number for number in behind if number in numbers]
                if owner not in wanted or not mine or not self._is_kept(unit, mine):
                    continue
                target = result.setdefault(self.key_of(owner, wanted[owner]), {})
                first = mine[0]
                target[key] = pieces[first] if first in pieces else copied(entries[first][key], offload=False)
        return result

    def _is_kept(self, unit: UnitNames, numbers: Sequence[int]) -> bool:
        # An optimizer makes no state for a slice of nothing, as it never has a gradient; one that is keyed by names
        # wants an entry for every name.
        return unit.is_flat or unit.keeps_shapes or self.by_name or any(unit.is_here(number) for number in numbers)

    def _is_cut(self, unit: UnitNames, number: int, key: str) -> bool:
        value = self.outline[unit.names[number]][key]
        if not isinstance(value, (torch.Tensor, Remote)):
            return False
        if unit.keeps_shapes:
            return value.ndim > 0
        return value.ndim > 0 or (tuple(unit.shapes[number]) == () and key in self.elementwise)

    def _pieces(self, unit: UnitNames, key: str, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """By number, what its owner gets of one state. All ranks of the unit's mesh must call it: they send."""
        if unit.keeps_shapes:
            device = unit.layout.local_values().device
            return {number: self._whole(unit, number, key).to(device, copy=True) for number in numbers}
        piece = self._scattered(unit, key, numbers) if self.first_only and unit.group else None
        if piece is None:
            dtype = self.outline[unit.names[numbers[0]]][key].dtype
            piece = torch.zeros_like(unit.layout.local_values(), dtype=dtype)
            for number in numbers:
                unit.lay(self._whole(unit, number, key), number, piece)
        if unit.is_flat:
            return dict.fromkeys(numbers, piece)
        return {number: piece[unit.places[number]].clone() for number in numbers}

    def _plain(self, value: Any) -> Any:
        """For a parameter outside of all units, which may have been in one when the dict was written."""
        return copied(value, offload=False) if chunks.local_rows(value) is None else self.names.units[0].whole(value)

    def _whole(self, unit: UnitNames, number: int, key: str) -> torch.Tensor:
        name = unit.names[number]
        if self.first_only:
            outline = self.outline[name][key]
            if not isinstance(outline, Remote):
                return torch.as_tensor(outline)
            value = torch.empty(outline.shape, dtype=outline.dtype, device=unit.layout.device)
            if name in self.values:
                value.copy_(self.values[name][key])
            if unit.mesh.replicate is not None:
                dist.broadcast(value, src=unit.mesh.replicate.ranks[0], group=unit.mesh.replicate.process_group)
            return value
        return unit.whole(self.values[name][key])

    def _scattered(self, unit: UnitNames, key: str, numbers: Sequence[int]) -> torch.Tensor:
        """This rank's piece of a row that the first rank lays out."""
        assert unit.group is not None
        dtype = self.outline[unit.names[numbers[0]]][key].dtype
        piece = torch.zeros_like(unit.layout.local_values(), dtype=dtype, device=unit.layout.device)
        replicate, group = unit.mesh.replicate, unit.group
        if replicate is None or replicate.rank == 0:
            pieces = None
            if group.rank == 0:
                row = unit.empty_row(dtype)[0].zero_()
                views = unit.layout.views_of(row)
                for number in numbers:
                    views[number].copy_(self.values[unit.names[number]][key])
                pieces = list(row.chunk(group.size))
            dist.scatter(piece, pieces, src=group.ranks[0], group=group.process_group)
        if replicate is not None:
            dist.broadcast(piece, src=replicate.ranks[0], group=replicate.process_group)
        return piece.to(unit.layout.local_values().device)

    def rest(self, groups: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
        """Parameters outside of all units, and keys of the user's own: as they are."""
        rest: dict[Any, Any] = {}
        wanted = {parameter: number for number, parameter in enumerate(_parameters(groups))}
        # In the order of the model and not of the optimizer, which may be another one on another rank.
        for parameter, name in self.names.outside.items():
            number = wanted.get(parameter)
            if number is not None and name in self.outline:
                entries = self.outline[name]
                rest[self.key_of(parameter, number)] = {key: self._plain(value) for key, value in entries.items()}
        unknown = {key: copy.deepcopy(v) for key, v in self.outline.items() if key not in self.names.every_name}
        return {**rest, **unknown}


def _parameters(groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]


# ---- 3. keys --------------------------------------------------------------------------------------------------------


def _numbered_groups(
    given: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], reading: _Reading
) -> list[dict[str, Any]]:
    """The optimizer's own groups, with the settings of the given ones."""
    group_of = {name: group for group in given for name in group["params"]}
    number = {parameter: index for index, parameter in enumerate(_parameters(own))}
    groups = []
    for index, group in enumerate(own):
        known = [p for p in group["params"] if any(name in group_of for name in reading.names.of[p])]
        names = [name for parameter in known for name in reading.names.of[parameter] if name in group_of]
        source = group_of[names[0]] if names else given[index] if index < len(given) else group
        settings = {k: copy.deepcopy(v) for k, v in source.items() if k not in ("params", "param_names")}
        if "param_names" in group:
            settings["param_names"] = list(group["param_names"])
        groups.append({**settings, "params": [reading.key_of(p, number[p]) for p in known]})
    return groups
