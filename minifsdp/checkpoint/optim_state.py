"""Saves and loads the optimizer's state: from local shards on each rank to original parameters by name, and back.

The parameters of the optimizer are shards. Adam keeps two averages for each element of its parameters, so rank 0 has
the averages of its own elements, under the number of the parameter in the optimizer. Such a dict is not a checkpoint,
because it lacks the other ranks' shards. If it is loaded on *all* ranks, each rank silently continues with rank 0's
averages for its own elements. So a round trip needs two conversions, `save` and `load`.

Worked example, Adam after one step, one unit with ``weight`` (2 x 3) and ``bias`` (3), two ranks, a flat parameter::

    optim.state_dict() on rank 0    {0: {"step": 1, "exp_avg": [w w w w w]}}
    optim.state_dict() on rank 1    {0: {"step": 1, "exp_avg": [w b b b .]}}
    result of `save`                {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}
    result of `load` on rank 1      {0: {"step": 1, "exp_avg": [w b b b .]}}                   padding is filled with 0
    with original parameters        {0: {"step": 1, "exp_avg": [w]}, 1: {"step": 1, "exp_avg": [b b b]}}

`save` has four steps:

1. *Describe the states by facts* (``codec.py``): the dtype of a state with a value per element, the value of a state
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

`load` returns a dict that ``optim.load_state_dict`` accepts on this rank, for any number of ranks, any wrapping, and
flat or original parameters. The checkpoint and the optimizer only need the same parameter names. It has three steps:

1. *Check* (``checks/optimizer_states.py``). If the dict of any rank does not fit, all ranks raise. After that all ranks
   have the facts about the states, from their own dict or from the first rank.
2. *Local shards.* They are computed for one state of one unit at a time. There are three sources:

   * all ranks have full values: each rank copies its own shard, and nothing is communicated;
   * only the first rank has them (``rank0_only``): it fills the unit's bucket and *scatters* the shards, so that no
     other rank receives more than its own shard;
   * all ranks have rows: they are all-gathered for one parameter at a time, and each rank copies its own shard.
3. *Keys.* Numbers, counted over the optimizer's own groups, or names for optimizers that use names as keys.

A parameter may have no state because it never had a gradient, or because it was frozen when the dict was written. If no
rank's dict has a state for it, it starts without one, as with a plain optimizer. A flat parameter has one state for all
its parameters, so if some of them have a state, the others need an entry. If the missing state is intended, add an
empty one, ``optim_state_dict["state"][name] = {}``; this part of the flat parameter then gets zeros.

*In torch:* ``_optim_utils.py``, 2110 lines, with separate code for flat and for original parameters, both unit by unit.
To load, a dict that only the first rank has is broadcast in full. Values are checked only when they are used, after
other values have been loaded, and only one rank raises.

Spec: OSD-01 to OSD-10, OSD-LOAD-01 to OSD-LOAD-08, HYB-10, MP-04.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from minifsdp.cases.containers import move
from minifsdp.checkpoint import tensors
from minifsdp.checkpoint.codec import (
    Facts,
    NamedOptimizer,
    PerElement,
    UnitCodec,
    copied,
    facts_given,
    facts_of,
    parameters_of,
    regrouped,
)
from minifsdp.checkpoint.state_dict_options import Form
from minifsdp.checks import agreement, optimizer_states
from minifsdp.engine.exchange import exchange, groups_of
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, rank_of_this_process, warn
from minifsdp.engine.shards import local_tensor

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


# ---- saving, 2. comparing --------------------------------------------------------------------------------------------


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


# ---- saving, 3. unit by unit, one state at a time --------------------------------------------------------------------


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


# ---- loading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@tensors.no_deprecation_warning()
@outside_inference_mode
def load(
    target: NamedOptimizer, given: Any, *, communicates: bool = True
) -> dict[str, Any]:
    """The dict for the optimizer's ``load_state_dict`` on this rank. All ranks of the model's groups must call it.

    Args:
        target: the optimizer and its model.
        given: the state by original names; ignored on a rank whose dict is not read.
        communicates: whether ranks check the dict together; if False, each rank checks alone.

    Raises:
        StateDictMismatchError: the dict does not fit the model or the optimizer, or the optimizer does not fit the
            model; on all ranks if ``communicates``.
        ValueError: there is no unit in the model.
    """
    first_only = target.form.first_only
    tensor_parallel = target.tensor_parallel
    if not target.units:
        raise ValueError(
            message("optimizer-without-fsdp", type=type(target.model).__name__)
        )
    groups = groups_of(unit.mesh for unit in target.units) if communicates else []
    agreement.monitored_barrier(groups, "optim_state_dict_to_load()")
    mesh = target.units[0].mesh
    # An empty dict fits any optimizer.
    is_first = mesh.is_first and not any(group.rank for group in tensor_parallel)
    source = given if is_first or not first_only else {"state": {}}
    optimizer_states.refuse_misfit(target, source, groups)
    state = source["state"]
    rest = {
        name: entries for name, entries in state.items() if name not in target.unit_of
    }
    senders = [*tensor_parallel, mesh.replicate, mesh.shard] if first_only else []
    facts, rest, given_groups = tensors.value_of_first_rank(
        (facts_given(target, state), rest, source.get("param_groups")), senders
    )
    loaded: dict[Any, Any] = {}
    for unit in target.units:
        loaded.update(_states_of(unit, facts, state, target))
    result: dict[str, Any] = {"state": {**loaded, **_rest(rest, target)}}
    if given_groups is not None:
        result["param_groups"] = _numbered_groups(given_groups, target)
    return result


# ---- loading, 2. local shards ----------------------------------------------------------------------------------------


def _states_of(
    unit: UnitCodec, facts: Facts, given: Mapping[str, Any], target: NamedOptimizer
) -> dict[Any, dict[str, Any]]:
    """One unit's states by the optimizer's keys. Communicates: all ranks of the unit's mesh must call it.

    Args:
        unit: the unit.
        facts: the states in the checked dict; the same on all ranks that exchange tensors.
        given: entries by name; empty on a rank whose dict is not read.
        target: the optimizer.
    """
    result: dict[Any, dict[str, Any]] = {}
    keeps_all = unit.is_flat or unit.keeps_shapes
    for name, entries in each_state(
        unit, facts, partial(_local_shards, unit, facts, given, target)
    ).items():
        owner = unit.owners[name]
        # An optimizer creates no state for an empty shard without a gradient. One that is keyed by names expects
        # exactly the entries that it has.
        is_expected = (
            keeps_all
            or unit.holds(name)
            or (target.by_name and owner in target.optim.state)
        )
        if entries and is_expected and owner in target.keys:
            # All parameters in a flat parameter have the same entries.
            result.setdefault(target.keys[owner], entries)
    return result


def _local_shards(
    unit: UnitCodec,
    facts: Facts,
    given: Mapping[str, Any],
    target: NamedOptimizer,
    key: str,
    dtype: torch.dtype,
    names: list[str],
) -> dict[str, torch.Tensor]:
    """The values of one state, by name. Communicates: all ranks of the unit's mesh must call it."""
    layout = unit.layout
    first_only = target.form.first_only
    values = {name: given[name][key] for name in names if key in given.get(name, {})}
    if first_only and target.tensor_parallel:
        sent = {
            name: tensors.value_of_first_rank(values.get(name), target.tensor_parallel)
            for name in names
        }
        values = sent if unit.mesh.is_first else {}
    empty = partial(torch.empty, dtype=dtype, device=layout.device)
    if unit.keeps_shapes:
        values = {name: unit.local_full(name, value) for name, value in values.items()}
        for name in names if first_only else ():
            shape = facts[name][key].shape
            mine = empty(
                layout.local_shapes[unit.keys[name]] if shape is None else shape
            )
            values[name] = tensors.shard_of_first_rank(
                unit.mesh, values.get(name), mine
            )
        return {
            name: _like_owner(unit.owners[name], values[name], dtype) for name in names
        }
    local = layout.local_values()
    if first_only:
        bucket = (
            empty(layout.sharding.padded_numel).zero_() if unit.mesh.is_first else None
        )
        views = [] if bucket is None else layout.views_of(bucket)
        for name, value in values.items():
            local_tensor(views[unit.keys[name]]).copy_(unit.local_full(name, value))
        shard = tensors.shard_of_first_rank(unit.mesh, bucket, empty(local.shape)).to(
            local.device
        )
    else:
        shard = unit.copy_into(torch.zeros_like(local, dtype=dtype), values)
    return {
        name: shard if unit.is_flat else shard[unit.places[unit.keys[name]]].clone()
        for name in names
    }


def _like_owner(
    owner: nn.Parameter, value: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """A copy of a state as its unsharded parameter has it: with its memory format, which a fused optimizer needs."""
    like = owner if owner.shape == value.shape else value
    return torch.empty_like(like, dtype=dtype, device=owner.device).copy_(value)


# ---- loading, 3. keys ------------------------------------------------------------------------------------------------


def _rest(rest: Mapping[Any, Any], target: NamedOptimizer) -> dict[Any, Any]:
    """Parameters outside of all units, and custom keys of the user: copied unchanged."""
    found = {
        key: copy.deepcopy(value)
        for key, value in rest.items()
        if key not in target.owners
    }
    # In the order of the model, because the order of the optimizer may differ between ranks.
    for parameter, name in target.outside.items():
        if parameter in target.keys and name in rest:
            found[target.keys[parameter]] = {
                key: _outside(parameter, value, target.units[0])
                for key, value in rest[name].items()
            }
    return found


def _outside(parameter: nn.Parameter, value: Any, unit: UnitCodec) -> Any:
    """A copy of a state of a parameter outside of all units."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if isinstance(parameter, DTensor) and is_plain and value.shape == parameter.shape:
        return distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    # The parameter may have been in a unit when the dict was written.
    is_whole = not tensors.is_sharded(value) or tensors.is_sharded_like(
        value, parameter
    )
    return copied(value) if is_whole else unit.unsharded(value)


def _numbered_groups(
    given: Sequence[Mapping[str, Any]], target: NamedOptimizer
) -> list[dict[str, Any]]:
    """The optimizer's own groups, with the settings of the given ones."""
    group_of = {name: group for group in given for name in group["params"]}
    groups = []
    for index, own in enumerate(target.optim.param_groups):
        known = [
            parameter
            for parameter in own["params"]
            if any(name in group_of for name in target.of[parameter])
        ]
        by_place = given[index] if index < len(given) else own
        found = [group_of[n] for n in target.originals_of(known) if n in group_of]
        groups.append(
            regrouped(
                found[0] if found else by_place,
                [target.keys[parameter] for parameter in known],
                own.get("param_names"),
            )
        )
    return groups
