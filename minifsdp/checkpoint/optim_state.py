"""Writing the optimizer's state: from shards, each on its rank, to original parameters by name.

An optimizer never learns that its parameters are shards. Adam keeps two averages for each element of what it was
given, so rank 0 has the averages of rank 0's elements, under a number that means "my first parameter". Saved as it is,
such a dict is of no use: it lacks the other ranks' part, and if it is loaded on *all* ranks, each one silently
continues with rank 0's averages for its own elements. Therefore a round trip is made of two translations, this one and
the one in ``optim_state_load.py``.

Worked example, Adam after one step, one unit with ``weight`` (2 x 3) and ``bias`` (3), two ranks, a flat parameter::

    optim.state_dict() on rank 0    {0: {"step": 1, "exp_avg": [w w w w w]}}
    optim.state_dict() on rank 1    {0: {"step": 1, "exp_avg": [w b b b .]}}
    this page makes                 {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}

1. What is what? A tensor of the parameter's own shape has a value *per element* and is cut as the parameter is.
   Anything else, Adam's ``step`` or a number or ``None``, is meant for the parameter *as a whole* and is copied.
2. Who has what? Ranks tell each other the names and dtypes of the states they have, in one message. An empty slice has
   no state at all, a unit that never saw a gradient has none anywhere. A rank that lacks what it should have, or has
   another ``step``, makes all ranks refuse (see ``optim_state_facts.py``).
3. Unit by unit, one state at a time: the piece is gathered into a row, the row is taken apart into parameters, each is
   copied to where it shall go, in full or this rank's rows of it, and the row is dropped. So beside the result there
   is never more than one row. A rank that is not to be given anything takes part and keeps nothing.
4. The groups of parameters are rewritten in names.

States of parameters outside of all units are copied as they are.

*In torch:* ``_optim_utils.py``, 2110 lines, with separate ways for flat and for original parameters, both unit by unit.

Spec: OSD-01 to OSD-10, HYB-10, MP-04.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minifsdp.checkpoint import agreement
from minifsdp.checkpoint.codec import Form
from minifsdp.checkpoint.optim_state_facts import States, copied, each_state, facts_of_all_ranks
from minifsdp.checkpoint.optim_state_names import ParameterNames, UnitNames, regrouped
from minifsdp.engine.messages import message, rank_of_this_process, warn


@torch.no_grad()
def write(
    model: nn.Module,
    optimizer: Any,
    given: Mapping[str, Any],
    form: Form,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The optimizer's state by original names. All ranks of the model's groups must call it.

    Args:
        model: a wrapper, or a module with wrappers in it.
        optimizer: made of the model's parameters after wrapping.
        given: its own state dict; keyed by numbers, or by names if it is an optimizer that does so.
        form: what to make of it.
        group: whose first rank speaks for all; by default that of the first unit.

    Returns:
        ``"state"`` by name and ``"param_groups"`` with names; empty on a rank that is not to be given anything.

    Raises:
        StateDictMismatchError: ranks have states that do not fit together, or an optimizer has parameters that the
            model has not; on all ranks.
    """
    names = ParameterNames(model)
    groups = agreement.groups_of(unit.mesh for unit in names.units)
    agreement.monitored_barrier(groups, "optim_state_dict()")
    keys, problems = names.keys(optimizer, given)
    states = {keys[key]: entries for key, entries in given["state"].items() if key in keys}
    # 1. and 2.
    by_unit, differences = facts_of_all_ranks(names, states)
    # A rank without keys seems to lack all states; what it says itself comes first.
    agreement.refuse_together(groups, [*problems, *differences])
    is_wanted = not form.first_only or _is_first(names, group)
    found: dict[Any, Any] = {}
    for unit, facts in zip(names.units, by_unit, strict=True):
        by_number = each_state(facts, _Writing(unit, states, form if is_wanted else None).values)
        found.update({unit.names[number]: entries for number, entries in by_number.items()})
    if not is_wanted:
        return {}
    for parameter, name in names.outside.items():
        if parameter in states:
            found[name] = {key: copied(value, offload=form.offload) for key, value in states[parameter].items()}
    # In the order of the model, which is the same on all ranks, and not of the optimizer: whoever gathers the rows of
    # such a dict will go through it from first to last.
    state = {**found, **_unknown(given["state"], keys)}
    if "param_groups" not in given:
        return {"state": state}
    return {"state": state, "param_groups": _named_groups(given["param_groups"], keys, names)}


def _is_first(names: ParameterNames, group: dist.ProcessGroup | None) -> bool:
    if group is not None:
        return group.rank() == 0
    return names.units[0].mesh.is_first if names.units else rank_of_this_process() == 0


# ---- 3. unit by unit, one state at a time ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Writing:
    """One unit's part.

    Attributes:
        unit: whose parameters.
        states: what this rank's optimizer has.
        form: what to make of it; ``None`` on a rank that takes part and keeps nothing.
    """

    unit: UnitNames
    states: States
    form: Form | None

    def values(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> dict[int, Any]:
        """One state of some parameters. All ranks of the unit's shard group must call it: they send."""
        unit, form = self.unit, self.form
        full = self._own(key, numbers) if unit.keeps_shapes else self._gathered(key, dtype, numbers)
        device = unit.layout.local_values().device
        return {} if form is None else {number: unit.formed(full[number], form, device) for number in numbers}

    def _own(self, key: str, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        return {number: self.states[self.unit.owners[number]][key] for number in numbers}

    def _gathered(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> list[torch.Tensor]:
        unit = self.unit
        row, piece = unit.empty_row(dtype)
        # Put together where the gather will want it: not even a piece more than the row.
        for number, own in self._own(key, filter(unit.is_here, numbers)).items():
            place = unit.places[number]
            # The state of a flat parameter is a piece already.
            piece[place].copy_(own[place] if unit.is_flat else own)
        return unit.gather(row, piece)


# ---- 4. the groups, and what is left --------------------------------------------------------------------------------


def _named_groups(
    given: Sequence[Mapping[str, Any]], keys: Mapping[Any, nn.Parameter], names: ParameterNames
) -> list[dict[str, Any]]:
    groups = []
    for group in given:
        originals = names.behind(keys[key] for key in group["params"])
        groups.append(regrouped(group, originals, originals if "param_names" in group else None))
    return groups


def _unknown(given: Mapping[Any, Any], keys: Mapping[Any, nn.Parameter]) -> dict[Any, Any]:
    """What the user has put into the state under other keys; a copy of it goes into the result."""
    unknown = {key: copy.deepcopy(value) for key, value in given.items() if key not in keys}
    if unknown:
        warn(message("unknown-optimizer-keys", keys=sorted(map(str, unknown))))
    return unknown
