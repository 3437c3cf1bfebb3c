"""Saving the optimizer's state: from local shards on each rank to original parameters by name.

The parameters of the optimizer are shards. Adam keeps two averages for each element of its parameters, so rank 0 has
the averages of its own elements, under the number of the parameter in the optimizer. Such a dict is not a checkpoint,
because it lacks the other ranks' shards. If it is loaded on *all* ranks, each rank silently continues with rank 0's
averages for its own elements. So a round trip needs two conversions: this one, and ``optim_state_load.py``.

Worked example, Adam after one step, one unit with ``weight`` (2 x 3) and ``bias`` (3), two ranks, a flat parameter::

    optim.state_dict() on rank 0    {0: {"step": 1, "exp_avg": [w w w w w]}}
    optim.state_dict() on rank 1    {0: {"step": 1, "exp_avg": [w b b b .]}}
    result of `save`                {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}

1. *Describe the states by facts* (``facts.py``): the dtype of a state with a value per element, the value of a state
   for the whole parameter.
2. *Compare the ranks.* An all-gather needs all ranks of a group, with equal dtypes. So the ranks of each shard group
   first exchange their facts in one message. A rank with no element of a parameter has no state for it; a unit without
   gradients has none on any rank. If a rank lacks a state that it should have, or has another ``step``, all ranks raise
   an error that lists the facts.
3. *All-gather one state of one unit at a time.* The local shards are all-gathered into a bucket, the bucket is split
   into parameters, each one is copied in the requested form (full, or this rank's rows), and the bucket is freed. So
   there is at most one bucket in addition to the result. A rank that gets no result takes part and keeps nothing.
4. *Convert the parameter groups* to names.

States of parameters outside of all units are copied unchanged.

*In torch:* ``_optim_utils.py``, 2110 lines, with separate code for flat and for original parameters, both unit by unit.

Spec: OSD-01 to OSD-10, HYB-10, MP-04.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minifsdp.cases.containers import move
from minifsdp.checkpoint import tensors
from minifsdp.checkpoint.codec import (
    NamedOptimizer,
    UnitCodec,
    parameters_of,
    regrouped,
)
from minifsdp.checkpoint.facts import Facts, PerElement, copied, facts_of
from minifsdp.checkpoint.state_dict_options import Form
from minifsdp.checks import agreement, optimizer_states
from minifsdp.engine.exchange import exchange, groups_of
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, rank_of_this_process, warn

# By parameter of the optimizer, by name of the state.
States = Mapping[nn.Parameter, Mapping[str, Any]]


@torch.no_grad()
@outside_inference_mode
def save(
    source: NamedOptimizer,
    given: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The optimizer's state by original names. All ranks of the model's groups must call it.

    Args:
        source: the optimizer and its model.
        given: the optimizer's own state dict, keyed by numbers or by names.
        group: with ``form.first_only``, its first rank gets the result; by default the first rank of the first unit.

    Returns:
        ``"state"`` by name and ``"param_groups"`` with names; empty on a rank that gets no result.

    Raises:
        StateDictMismatchError: the states of the ranks do not match, or an optimizer has parameters that the model does
            not have; raised on all ranks.
    """
    form = source.form
    groups = groups_of(unit.mesh for unit in source.units)
    agreement.monitored_barrier(groups, "optim_state_dict()")
    keys, problems = _parameters_by_key(source, given)
    states = {
        keys[key]: entries for key, entries in given["state"].items() if key in keys
    }
    facts, differences = _facts_of_all_ranks(source, states)
    # A rank whose keys are invalid seems to lack all states, so its own problems are listed first.
    agreement.refuse_together(
        [*groups, *source.tensor_parallel], [*problems, *differences]
    )
    # The first ranks of the units all-gather the values of tensor parallelism, and one of them keeps the result.
    rank = rank_of_this_process() if group is None else group.rank()
    is_first = (
        source.units[0].mesh.is_first if source.units and group is None else rank == 0
    )
    is_wanted = is_first or not form.first_only
    is_kept = is_wanted and not (
        form.first_only and any(group.rank for group in source.tensor_parallel)
    )
    found: dict[Any, Any] = {}
    for unit in source.units:
        converted = each_state(
            unit, facts, partial(_in_form, unit, states, form if is_wanted else None)
        )
        if is_kept:
            found.update(converted)
    for parameter, name in source.outside.items():
        if is_wanted and parameter in states:
            found[name] = {
                key: copied(
                    tensors.complete(value) if form.is_complete else value,
                    offload=form.offload,
                )
                for key, value in states[parameter].items()
            }
    if not is_kept:
        return {}
    # The dict has the order of the model, which is the same on all ranks, because code that all-gathers the values of
    # a sharded dict iterates over it in order.
    unknown = {
        key: copy.deepcopy(entries)
        for key, entries in given["state"].items()
        if key not in keys
    }
    if unknown:
        # Custom keys of the user are saved as well.
        warn(message("unknown-optimizer-keys", keys=sorted(map(str, unknown))))
    result: dict[str, Any] = {"state": {**found, **unknown}}
    if "param_groups" in given:
        result["param_groups"] = []
        for own in given["param_groups"]:
            originals = source.originals_of(keys[key] for key in own["params"])
            result["param_groups"].append(
                regrouped(own, originals, originals if "param_names" in own else None)
            )
    return result


def _parameters_by_key(
    source: NamedOptimizer, given: Mapping[str, Any]
) -> tuple[dict[Any, nn.Parameter], list[str]]:
    """Maps the keys of the optimizer's own state dict, numbers or names, to parameters. Also returns the problems.

    If there are problems, the map is empty.
    """
    numbers = [{"params": range(len(source.keys))}]
    keys = parameters_of(given.get("param_groups", numbers))
    if problems := optimizer_states.key_problems(source, keys):
        return {}, problems
    return dict(zip(keys, source.keys, strict=True)) | source.named, []


# ---- 2. comparing ---------------------------------------------------------------------------------------------------


def _facts_of_all_ranks(
    source: NamedOptimizer, states: States
) -> tuple[Facts, list[str]]:
    """The facts of all parameters, the same on all ranks of a shard group, and a description of each mismatch."""
    in_units = {source.owners[name] for name in source.unit_of} & states.keys()
    facts = {
        owner: facts_of(states[owner], owner.shape, elementwise=states[owner])
        for owner in in_units
    }
    # Sent without names, which are equal on all ranks.
    mine = [facts.get(source.owners[name]) for name in source.unit_of]
    # Replicas have equal shards, so the facts of this rank's shard group are enough.
    by_rank = exchange(
        groups_of(MeshGroups(unit.mesh.shard, None) for unit in source.units),
        move(torch.device("cpu"), mine),
    )
    merged: Facts = {}
    problems: list[str] = []
    for number, (name, unit) in enumerate(source.unit_of.items()):
        ranks = (
            [rank_of_this_process()] if unit.group is None else list(unit.group.ranks)
        )
        # A rank without an element of the parameter may have an empty state or none, so it is not compared.
        # In a simulation, one process runs all ranks, and only its own facts exist.
        holders = [
            rank
            for place, rank in enumerate(ranks)
            if rank in by_rank and unit.holds(name, place)
        ]
        known = {
            rank: by_rank[rank][number] for rank in holders or ranks if rank in by_rank
        }
        reported = {rank: found for rank, found in known.items() if found is not None}
        if reported:
            merged[name] = next(iter(reported.values()))
            problems.extend(optimizer_states.mismatches(unit, name, holders, reported))
    return merged, problems


# ---- 3. unit by unit, one state at a time ---------------------------------------------------------------------------


def each_state(
    unit: UnitCodec,
    facts: Facts,
    values_of: Callable[[str, torch.dtype, list[str]], Mapping[str, Any]],
) -> Facts:
    """Converts the states of a unit. A state that applies to a whole parameter is copied.

    Args:
        unit: the unit.
        facts: the facts of its parameters, and of others.
        values_of: converts one state with a value per element; called for one state after the other. Gets the state's
            name, its dtype, and the names of the parameters that share one bucket. Returns their values by name.
            Usually a state has one dtype, but an optimizer may use another dtype for the biases than for the weights.
    """
    result = {
        name: {key: copied(fact) for key, fact in facts[name].items()}
        for name in unit.names
        if name in facts
    }
    buckets: dict[tuple[str, torch.dtype], list[str]] = {}
    for name, entries in result.items():
        for key, fact in entries.items():
            if isinstance(fact, PerElement):
                buckets.setdefault((key, fact.dtype), []).append(name)
    for (key, dtype), names in buckets.items():
        for name, value in values_of(key, dtype, names).items():
            result[name][key] = value
    return result


def _in_form(
    unit: UnitCodec,
    states: States,
    form: Form | None,
    key: str,
    dtype: torch.dtype,
    names: list[str],
) -> dict[str, Any]:
    """The values of one state. Issues an all-gather: all ranks of the unit's shard group must call it.

    With ``form=None``, this rank takes part and gets no values.
    """
    full = {
        name: states[unit.owners[name]][key]
        for name in names
        if unit.keeps_shapes or unit.holds(name)
    }
    if unit.keeps_shapes:
        full = {name: unit.as_parameter(name, value) for name, value in full.items()}
    else:
        full = dict(zip(unit.names, unit.all_gathered(full, dtype), strict=True))
    device = unit.layout.local_values().device
    return (
        {}
        if form is None
        else {name: unit.in_form(full[name], form, device) for name in names}
    )
