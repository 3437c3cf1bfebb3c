"""Loading the optimizer's state: from original parameters by name to this rank's shards, under numbers.

This is the reverse of ``optim_state.py``. ``optim.load_state_dict`` accepts the result on this rank, for any number of
ranks, any wrapping, and flat or original parameters. The checkpoint and the optimizer only need the same parameter
names. Worked example, the unit of ``optim_state.py``, on rank 1 of two, whose local shard is ``w b b b .``::

    given     {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}
    flat      {0: {"step": 1, "exp_avg": [w b b b .]}}                           padding is filled with 0
    original  {0: {"step": 1, "exp_avg": [w]}, 1: {"step": 1, "exp_avg": [b b b]}}

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

*In torch:* ``_flatten_optim_state_dict``. A dict that only the first rank has is broadcast in full. Values are checked
only when they are used, after other values have been loaded, and only one rank raises.

Spec: OSD-LOAD-01 to OSD-LOAD-08.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from minifsdp.checkpoint import tensors
from minifsdp.checkpoint.codec import (
    NamedOptimizer,
    UnitCodec,
    regrouped,
)
from minifsdp.checkpoint.facts import Facts, copied, facts_given
from minifsdp.checkpoint.optim_state import each_state
from minifsdp.checks import agreement, optimizer_states
from minifsdp.engine.exchange import groups_of
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message
from minifsdp.engine.shards import local_tensor


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


# ---- 2. local shards ------------------------------------------------------------------------------------------------


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


# ---- 3. keys --------------------------------------------------------------------------------------------------------


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
