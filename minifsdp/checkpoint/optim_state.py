"""Saving the optimizer's state: from shards on each rank to original parameters by name.

An optimizer does not know that its parameters are shards. Adam keeps two averages for each element of its parameters,
so rank 0 has the averages of rank 0's elements, under a number that means "my first parameter". Such a dict is not
a checkpoint. It lacks the other ranks' shards. If it is loaded on *all* ranks, each rank silently continues with rank
0's averages for its own elements. So a round trip needs two conversions: this one, and ``optim_state_load.py``.

Worked example, Adam after one step, one unit with ``weight`` (2 x 3) and ``bias`` (3), two ranks, a flat parameter::

    optim.state_dict() on rank 0    {0: {"step": 1, "exp_avg": [w w w w w]}}
    optim.state_dict() on rank 1    {0: {"step": 1, "exp_avg": [w b b b .]}}
    result of `write`               {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}

1. *Classify the states.* A tensor with the parameter's own shape has a value *per element* and is sharded like the
   parameter. Any other state, such as Adam's ``step``, a number or ``None``, applies to the *whole* parameter and is
   copied.
2. *Compare the ranks.* Ranks exchange the names and dtypes of their states in one message. A rank with no element of
   a parameter has no state for it; a unit without gradients has none on any rank. If a rank lacks a state that it
   should have, or has another ``step``, all ranks raise an error (see ``optim_state_facts.py``).
3. *All-gather one state of one unit at a time.* The local shards are all-gathered into a bucket, the bucket is split
   into parameters, each one is copied in the requested form (full, or this rank's rows), and the bucket is freed. So
   there is at most one bucket in addition to the result. A rank that gets no result takes part and keeps nothing.
4. *Convert the parameter groups* to names.

States of parameters outside of all units are copied unchanged.

*In torch:* ``_optim_utils.py``, 2110 lines, with separate code for flat and for original parameters, both unit by unit.

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
        model: a wrapper, or a module that contains wrappers.
        optimizer: created from the model's parameters after wrapping.
        given: its own state dict; keyed by numbers, or by names if the optimizer does that.
        form: the form of the result.
        group: with ``form.first_only``, its first rank gets the result; by default the first rank of the first unit.

    Returns:
        ``"state"`` by name and ``"param_groups"`` with names; empty on a rank that gets no result.

    Raises:
        StateDictMismatchError: the states of the ranks do not match, or an optimizer has parameters that the model does
            not have; on all ranks.
    """
    names = ParameterNames(model)
    groups = agreement.groups_of(unit.mesh for unit in names.units)
    agreement.monitored_barrier(groups, "optim_state_dict()")
    keys, problems = names.keys(optimizer, given)
    states = {keys[key]: entries for key, entries in given["state"].items() if key in keys}
    # 1. and 2.
    by_unit, differences = facts_of_all_ranks(names, states)
    # A rank whose keys are invalid seems to lack all states, so its own problems are listed first.
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
    # In the order of the model, which is the same on all ranks, and not of the optimizer: code that all-gathers the
    # values of a sharded dict iterates over it in order.
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
    """The conversion of one unit's states.

    Attributes:
        unit: the unit.
        states: of this rank's optimizer.
        form: the form of the result; ``None`` on a rank that takes part and keeps nothing.
    """

    unit: UnitNames
    states: States
    form: Form | None

    def values(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> dict[int, Any]:
        """One state of some parameters. Issues an all-gather: all ranks of the unit's shard group must call it."""
        unit, form = self.unit, self.form
        full = self._own(key, numbers) if unit.keeps_shapes else self._gathered(key, dtype, numbers)
        device = unit.layout.local_values().device
        return {} if form is None else {number: unit.formed(full[number], form, device) for number in numbers}

    def _own(self, key: str, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        return {number: self.states[self.unit.owners[number]][key] for number in numbers}

    def _gathered(self, key: str, dtype: torch.dtype, numbers: Sequence[int]) -> list[torch.Tensor]:
        unit = self.unit
        row, local_shard = unit.empty_row(dtype)
        # Filled in place in the bucket, so that the all-gather needs no additional memory for the shard.
        for number, own in self._own(key, filter(unit.is_here, numbers)).items():
            place = unit.places[number]
            # The state of a flat parameter already has the layout of the local shard.
            local_shard[place].copy_(own[place] if unit.is_flat else own)
        return unit.all_gather(row, local_shard)


# ---- 4. the parameter groups, and other entries ---------------------------------------------------------------------


def _named_groups(
    given: Sequence[Mapping[str, Any]], keys: Mapping[Any, nn.Parameter], names: ParameterNames
) -> list[dict[str, Any]]:
    groups = []
    for group in given:
        originals = names.behind(keys[key] for key in group["params"])
        groups.append(regrouped(group, originals, originals if "param_names" in group else None))
    return groups


def _unknown(given: Mapping[Any, Any], keys: Mapping[Any, nn.Parameter]) -> dict[Any, Any]:
    """Copies entries that the user has added to the state under other keys; they become part of the result."""
    unknown = {key: copy.deepcopy(value) for key, value in given.items() if key not in keys}
    if unknown:
        warn(message("unknown-optimizer-keys", keys=sorted(map(str, unknown))))
    return unknown
