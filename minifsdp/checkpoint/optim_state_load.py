"""Loading the optimizer's state: from original parameters by name to this rank's shards, under numbers.

This is the reverse of ``optim_state.py``. ``optim.load_state_dict`` accepts the result on this rank, for any number of
ranks, any wrapping, and flat or original parameters. The checkpoint and the optimizer only need the same parameter
names. Worked example, the unit of ``optim_state.py``, on rank 1 of two, whose local shard is ``w b b b .``::

    given     {"weight": {"step": 1, "exp_avg": 2 x 3}, "bias": {"step": 1, "exp_avg": 3}}
    flat      {0: {"step": 1, "exp_avg": [w b b b .]}}                           padding is filled with 0
    original  {0: {"step": 1, "exp_avg": [w]}, 1: {"step": 1, "exp_avg": [b b b]}}

1. *Check.* An optimizer accepts any dict, and a mistake may only cause a slightly higher loss. So names, shapes and
   types are compared with the optimizer. If all are valid, the values that a flat parameter stores only once are
   compared with each other. If any rank finds a problem, all ranks raise. After that all ranks have the facts about the
   states, from their own dict or from the first rank.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from minifsdp.checkpoint import agreement, tensors
from minifsdp.checkpoint.codec import (
    ParameterNames,
    UnitCodec,
    parameters_of,
    regrouped,
    tensor_parallel_groups,
)
from minifsdp.checkpoint.optim_state import (
    Facts,
    copied,
    differences,
    each_state,
    facts_of,
)
from minifsdp.checkpoint.state_dict_options import Form
from minifsdp.engine.exchange import groups_of
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import detail, message
from minifsdp.engine.shards import local_tensor


@dataclass
class Target:
    """The optimizer into which a dict is loaded, and its model.

    Attributes:
        model: a wrapper, or a module that contains wrappers.
        optim: an optimizer of the model's parameters.
        form: the form of the dict; with ``form.first_only`` only the first rank's dict is read.
        by_name: whether the optimizer keys its state by the names that parameters have in the wrapped model.
        is_lenient: accept a dict that lacks parameters outside of all units.
        clean: a function that removes other parts from original names.
        names: the parameter names of the model.
        tensor_parallel: the groups of tensor parallelism, if ``form.is_complete``.
        keys: the keys of the parameters in the optimizer's own state dict: numbers, counted over its groups, or names.
    """

    model: nn.Module
    optim: Any
    form: Form
    by_name: bool = False
    is_lenient: bool = False
    clean: Callable[[str], str] = str

    def __post_init__(self) -> None:
        self.names = ParameterNames(self.model, self.clean)
        self.tensor_parallel = (
            tensor_parallel_groups(self.names.units) if self.form.is_complete else []
        )
        names = self.names.current_names if self.by_name else {}
        numbered = enumerate(parameters_of(self.optim.param_groups))
        self.keys = {
            parameter: names.get(parameter, number) for number, parameter in numbered
        }


@torch.no_grad()
@tensors.no_deprecation_warning()
@outside_inference_mode
def load(target: Target, given: Any, *, communicates: bool = True) -> dict[str, Any]:
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
    names = target.names
    first_only = target.form.first_only
    tensor_parallel = target.tensor_parallel
    if not names.units:
        raise ValueError(
            message("optimizer-without-fsdp", type=type(target.model).__name__)
        )
    groups = groups_of(unit.mesh for unit in names.units) if communicates else []
    agreement.monitored_barrier(groups, "optim_state_dict_to_load()")
    mesh = names.units[0].mesh
    # An empty dict fits any optimizer.
    is_first = mesh.is_first and not any(group.rank for group in tensor_parallel)
    source = given if is_first or not first_only else {"state": {}}
    problems = names.unknown(target.keys) or _problems(source, target)
    if first_only:
        apart = [
            unit for unit in names.units if unit.mesh.is_first is not mesh.is_first
        ]
        problems += [detail("first-rank-apart", unit=unit.unit.name) for unit in apart]
    agreement.refuse_together([*groups, *tensor_parallel], problems)
    state = source["state"]
    if not first_only:
        # Rows are all-gathered one by one, so each rank must have them, with the same dtype.
        mine = [
            detail("states-on-others", name=name)
            for name in names.unit_of
            if state.get(name)
        ]
        for name, key, tensor in _tensors_in(state, names):
            if tensors.is_sharded(tensor):
                mine.append(
                    detail("rows-lacking", name=name, key=key, dtype=tensor.dtype)
                )
        agreement.refuse_lacking(groups, mine)
    rest = {
        name: entries for name, entries in state.items() if name not in names.unit_of
    }
    outline = _facts_given(names, state), rest, source.get("param_groups")
    if first_only:
        outline = agreement.value_of_first_rank(
            outline, [*tensor_parallel, mesh.replicate, mesh.shard]
        )
    facts, rest, given_groups = outline
    loaded: dict[Any, Any] = {}
    for unit in names.units:
        loaded.update(_states_of(unit, facts, state, target))
    result: dict[str, Any] = {"state": {**loaded, **_rest(rest, target)}}
    if given_groups is not None:
        result["param_groups"] = _numbered_groups(given_groups, target)
    return result


# ---- 1. the check ---------------------------------------------------------------------------------------------------


def _facts_given(names: ParameterNames, state: Mapping[str, Any]) -> Facts:
    """The facts of a dict about parameters in units. Nothing is communicated."""
    found = [(key, tensor) for _, key, tensor in _tensors_in(state, names)]
    # A 0-d value for a 0-d parameter is ambiguous. A state that has dimensions for any parameter is per element. If all
    # parameters are 0-d, all states except the step counter are per element.
    elementwise = {key for key, tensor in found if tensor.ndim} or {
        key for key, _ in found if key != "step"
    }
    return {
        name: facts_of(state[name], unit.shapes[name], elementwise)
        for name, unit in names.unit_of.items()
        if name in state
    }


def _tensors_in(
    state: Mapping[str, Any], names: ParameterNames
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """All tensors in a dict's parameter states, with the names of the parameter and the state."""
    for name in names.owners:
        for key, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                yield name, key, value


def _problems(given: Any, target: Target) -> list[str]:
    """Describes each problem of a dict; the list is empty if the dict fits."""
    if not isinstance(given, Mapping) or "state" not in given:
        found = (
            sorted(map(str, given))
            if isinstance(given, Mapping)
            else type(given).__name__
        )
        return [detail("state-missing", found=found)]
    state = given["state"]
    if numbers := [key for key in state if isinstance(key, int)]:
        return [detail("state-numbered", numbers=numbers[:3])]
    if wrong := [
        name
        for name in target.names.owners
        if not isinstance(state.get(name, {}), Mapping)
    ]:
        return [
            detail("state-no-dict", name=wrong[0], found=type(state[wrong[0]]).__name__)
        ]
    problems = [*_name_problems(given, target), *_tensor_problems(state, target)]
    # Values are compared with each other only if each of them is valid.
    facts = _facts_given(target.names, state)
    return problems or [
        text
        for unit in target.names.units
        if unit.is_flat
        for text in _stored_once(unit, facts)
    ]


def _name_problems(given: Mapping[str, Any], target: Target) -> Iterator[str]:
    """Compares the groups of the dict with those of the optimizer, and finds parameters that only the dict has."""
    state = given["state"]
    names = target.names
    listed = {
        name: n
        for n, group in enumerate(given.get("param_groups", ()))
        for name in group["params"]
    }
    optional = set(names.outside.values()) if target.is_lenient else set()
    for index, group in enumerate(
        target.optim.param_groups if "param_groups" in given else ()
    ):
        wanted = names.originals_of(group["params"])
        yield from (
            detail("in-no-group", name=name)
            for name in wanted
            if name not in listed and name not in optional
        )
        instances = {listed[name]: name for name in reversed(wanted) if name in listed}
        if len(instances) > 1:
            sources = sorted(instances)
            yield detail(
                "groups-differ",
                index=index,
                sources=sources,
                instances=[instances[s] for s in sources],
            )
    # The optimizer's own state may have custom keys, and then the dict may have them, too.
    owned = {*names.originals_of(target.keys), *target.optim.state}
    for name in dict.fromkeys([*listed, *state]):
        # Custom entries are allowed if they do not look like the states of a parameter.
        if name not in owned and (
            name in listed
            or name in names.owners
            or isinstance(state.get(name), Mapping)
        ):
            yield detail("state-superfluous", name=name)


def _tensor_problems(state: Mapping[str, Any], target: Target) -> Iterator[str]:
    """Whether each tensor has the right form and, if the shape is fixed, the right shape."""
    names = target.names
    form = target.form
    found = [
        (f"optimizer state {key!r} of {name!r}", name, value)
        for name, key, value in _tensors_in(state, names)
    ]
    for where, name, tensor in found:
        unit = names.unit_of.get(name)
        if unit is not None:
            any_shape = unit.keeps_shapes or tensor.ndim == 0
            yield from unit.misfit(name, where, tensor, form, any_shape=any_shape)
        elif not tensors.is_sharded_like(tensor, names.owners[name]):
            # The parameter may have been in a unit when the dict was written.
            yield from tensors.misplaced_rows(
                tensor, where, names.units[0].group, may_be_sharded=form.is_sharded
            )
    if form.is_sharded:
        sharded = {
            name for name, unit in names.unit_of.items() if unit.group is not None
        }
        yield from tensors.all_unsharded(
            (where, tensor) for where, name, tensor in found if name in sharded
        )


def _stored_once(unit: UnitCodec, facts: Facts) -> Iterator[str]:
    """A flat parameter has each state once, so all parameters in it must have the same states with equal values."""
    reported = {name: facts[name] for name in unit.names if facts.get(name)}
    for name in unit.names if reported else ():
        # If other parameters of the unit have states, a parameter without states needs an empty entry.
        if (
            name not in facts
            and unit.owners[name].requires_grad
            and unit.shapes[name].numel()
        ):
            yield detail("states-missing", name=name, first=next(iter(reported)))
    for key, first, name in differences(reported):
        there, other = (first, name) if key in reported[first] else (name, first)
        if key not in reported[other]:
            yield detail("state-lacking", key=key, lacking=other, there=there)
        else:
            yield detail(
                "state-only-once",
                key=key,
                expected=reported[first][key],
                first=first,
                found=reported[name][key],
                name=name,
            )


# ---- 2. local shards ------------------------------------------------------------------------------------------------


def _states_of(
    unit: UnitCodec, facts: Facts, given: Mapping[str, Any], target: Target
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
    target: Target,
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
            name: agreement.value_of_first_rank(
                values.get(name), target.tensor_parallel
            )
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
            values[name] = agreement.shard_of_first_rank(
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
        shard = agreement.shard_of_first_rank(unit.mesh, bucket, empty(local.shape)).to(
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


def _rest(rest: Mapping[Any, Any], target: Target) -> dict[Any, Any]:
    """Parameters outside of all units, and custom keys of the user: copied unchanged."""
    names = target.names
    found = {
        key: copy.deepcopy(value)
        for key, value in rest.items()
        if key not in names.owners
    }
    # In the order of the model, because the order of the optimizer may differ between ranks.
    for parameter, name in names.outside.items():
        if parameter in target.keys and name in rest:
            found[target.keys[parameter]] = {
                key: _outside(parameter, value, names.units[0])
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
    given: Sequence[Mapping[str, Any]], target: Target
) -> list[dict[str, Any]]:
    """The optimizer's own groups, with the settings of the given ones."""
    names = target.names
    group_of = {name: group for group in given for name in group["params"]}
    groups = []
    for index, own in enumerate(target.optim.param_groups):
        known = [
            parameter
            for parameter in own["params"]
            if any(name in group_of for name in names.of[parameter])
        ]
        found = [name for name in names.originals_of(known) if name in group_of]
        source = (
            group_of[found[0]] if found else given[index] if index < len(given) else own
        )
        groups.append(
            regrouped(
                source,
                [target.keys[parameter] for parameter in known],
                own.get("param_names"),
            )
        )
    return groups
