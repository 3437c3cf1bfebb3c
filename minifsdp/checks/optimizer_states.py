"""Checks of optimizer states: whether the ranks have the same states, and whether a dict fits an optimizer.

An optimizer accepts any dict, and a mistake may only cause a slightly higher loss. So names, shapes and types are
compared with the optimizer before any value is loaded. If all are valid, the values that a flat parameter stores only
once are compared with each other. If any rank finds a problem, all ranks raise.

Worked example, a flat parameter of ``weight`` and ``bias``, and a dict in which ``weight`` has taken 7 steps and
``bias`` 8: each value is valid, but the flat parameter has one step counter. `refuse_misfit` names both parameters.

*In torch:* values are checked only when they are used, after other values were loaded, and only one rank raises.

Spec: OSD-02, OSD-LOAD-01, OSD-LOAD-03.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from minifsdp.checkpoint import tensors
from minifsdp.checkpoint.codec import (
    Facts,
    NamedOptimizer,
    PerElement,
    UnitCodec,
    facts_given,
    tensors_in,
)
from minifsdp.checks import agreement, state_dicts
from minifsdp.checks.details import detail
from minifsdp.engine.mesh import Group


def refuse_misfit(target: NamedOptimizer, given: Any, groups: Sequence[Group]) -> None:
    """Raises on every rank if the dict of any rank does not fit its optimizer. All ranks of the groups must call it.

    Args:
        target: the optimizer and its model.
        given: the dict; an empty one on a rank whose dict is not read.
        groups: the groups of the model that check the dict together; if empty, only this rank is checked.
    """
    is_first = target.units[0].mesh.is_first
    problems = unknown_parameters(target) or _problems(given, target)
    if target.form.first_only:
        problems += [
            detail("first-rank-apart", unit=unit.unit.name)
            for unit in target.units
            if unit.mesh.is_first is not is_first
        ]
    agreement.refuse_together([*groups, *target.tensor_parallel], problems)
    if not target.form.first_only:
        # Rows are all-gathered one by one, so each rank must have them, with the same dtype.
        state = given["state"]
        mine = [
            detail("states-on-others", name=name)
            for name in target.unit_of
            if state.get(name)
        ]
        mine += [
            detail("rows-lacking", name=name, key=key, dtype=tensor.dtype)
            for name, key, tensor in tensors_in(state, target)
            if tensors.is_sharded(tensor)
        ]
        agreement.refuse_lacking(groups, mine)


def unknown_parameters(target: NamedOptimizer) -> list[str]:
    """Describes the problem if the optimizer has parameters that the model does not have."""
    shapes = [tuple(p.shape) for p in target.keys if p not in target.of]
    return (
        [detail("foreign-parameters", number=len(shapes), shapes=shapes[:5])]
        if shapes
        else []
    )


def key_problems(target: NamedOptimizer, keys: Sequence[Any]) -> list[str]:
    """Describes why the keys of an optimizer's own state dict, numbers or names, do not fit its parameters."""
    problems = unknown_parameters(target)
    unknown = [key for key in keys if isinstance(key, str) and key not in target.named]
    if len(keys) != len(target.keys):
        problems.append(detail("own-count", expected=len(target.keys), found=len(keys)))
    elif unknown:
        problems.append(detail("own-names", strangers=unknown[:5]))
    return problems


def _problems(given: Any, target: NamedOptimizer) -> list[str]:
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
        name for name in target.owners if not isinstance(state.get(name, {}), Mapping)
    ]:
        return [
            detail("state-no-dict", name=wrong[0], found=type(state[wrong[0]]).__name__)
        ]
    problems = [*_name_problems(given, target), *_tensor_problems(state, target)]
    # Values are compared with each other only if each of them is valid.
    facts = facts_given(target, state)
    return problems or [
        text
        for unit in target.units
        if unit.is_flat
        for text in _stored_once(unit, facts)
    ]


def _name_problems(given: Mapping[str, Any], target: NamedOptimizer) -> Iterator[str]:
    """Compares the groups of the dict with those of the optimizer, and finds parameters that only the dict has."""
    state = given["state"]
    listed = {
        name: n
        for n, group in enumerate(given.get("param_groups", ()))
        for name in group["params"]
    }
    optional = set(target.outside.values()) if target.is_lenient else set()
    for index, group in enumerate(
        target.optim.param_groups if "param_groups" in given else ()
    ):
        wanted = target.originals_of(group["params"])
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
    owned = {*target.originals_of(target.keys), *target.optim.state}
    for name in dict.fromkeys([*listed, *state]):
        # Custom entries are allowed if they do not look like the states of a parameter.
        if name not in owned and (
            name in listed
            or name in target.owners
            or isinstance(state.get(name), Mapping)
        ):
            yield detail("state-superfluous", name=name)


def _tensor_problems(state: Mapping[str, Any], target: NamedOptimizer) -> Iterator[str]:
    """Whether each tensor has the right form and, if the shape is fixed, the right shape."""
    form = target.form
    found = [
        (f"optimizer state {key!r} of {name!r}", name, value)
        for name, key, value in tensors_in(state, target)
    ]
    for where, name, tensor in found:
        unit = target.unit_of.get(name)
        if unit is not None:
            yield from state_dicts.misfit(
                unit,
                name,
                where,
                tensor,
                form,
                any_shape=unit.keeps_shapes or tensor.ndim == 0,
            )
        elif not tensors.is_sharded_like(tensor, target.owners[name]):
            # The parameter may have been in a unit when the dict was written.
            yield from state_dicts.misplaced_rows(
                tensor, where, target.units[0].group, may_be_sharded=form.is_sharded
            )
    if form.is_sharded:
        sharded = {
            name for name, unit in target.unit_of.items() if unit.group is not None
        }
        yield from state_dicts.all_unsharded(
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


def mismatches(
    unit: UnitCodec, name: str, holders: list[int], reported: dict[int, Any]
) -> Iterator[str]:
    """Describes how the facts of one parameter differ between ranks. Only ranks with an element are compared."""
    lacking = [rank for rank in holders if rank not in reported]
    if lacking:
        yield detail(
            "state-on-some-ranks", name=name, having=list(reported), lacking=lacking
        )
    for key, first, rank in differences(reported) if holders and not lacking else ():
        yield detail(
            "state-differs",
            key=key,
            name=name,
            expected=reported[first].get(key),
            first=first,
            found=reported[rank].get(key),
            rank=rank,
        )
    for key, fact in next(iter(reported.values())).items():
        if (
            isinstance(fact, PerElement)
            and fact.shape is not None
            and not unit.keeps_shapes
        ):
            yield detail("state-unfit", key=key, name=name, shape=fact.shape)


def differences(
    reported: Mapping[Any, Mapping[str, Any]],
) -> Iterator[tuple[str, Any, Any]]:
    """The states whose facts differ from the first ones: the state's name, and the keys of the two facts."""
    first, *others = reported or [None]
    for other in others:
        expected = reported[first]
        found = reported[other]
        for key in sorted({*expected, *found}):
            if (
                key not in expected
                or key not in found
                or not _same(expected[key], found[key])
            ):
                yield key, first, other


def _same(one: Any, other: Any) -> bool:
    """Whether two values for a whole parameter are equal; they may be lists or dicts of tensors."""
    mine, shape = tree_flatten(one)
    theirs, other_shape = tree_flatten(other)
    return shape == other_shape and all(map(_equal, mine, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return (
        not isinstance(one, torch.Tensor)
        and not isinstance(other, torch.Tensor)
        and bool(one == other)
    )
