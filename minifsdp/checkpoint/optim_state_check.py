"""Does an optimizer's state dict fit? Asked before anything is made of it.

A dict that does not fit is worse than none: an optimizer copies what it is given, and the mistake shows up, if at all,
as a loss that is a little too high. Each complaint names the key, what was expected there and what was found; the rank
is added when the ranks compare their complaints.

Worked example, one unit with ``weight`` (2 x 3) and ``bias`` (3)::

    {"weight": {"exp_avg": 3 x 2}, ...}          expected shape (2, 3), found (3, 2)
    {"weight": {"step": 4}, "bias": {"step": 5}} expected one 'step' for a flat parameter, found 4 and 5
    {0: {...}}                                   expected names, found numbers: the dict of a plain optimizer

Nothing here is sent, and nothing is changed.

*In torch:* shapes and the values of a flat parameter are checked when they are used, halfway through.

Spec: OSD-LOAD-01 to OSD-LOAD-08.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minifsdp.checkpoint import chunks
from minifsdp.checkpoint.optim_state_facts import same
from minifsdp.checkpoint.optim_state_names import ParameterNames, UnitNames
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import detail


@dataclass(frozen=True)
class Expected:
    """What the dict is compared with.

    Attributes:
        names: of the model.
        groups: the optimizer's own.
        is_sharded: whether tensors of units shall be rows.
        own_keys: keys of the user's own in the optimizer's state.
        is_lenient: whether parameters outside of all units may be missing.
    """

    names: ParameterNames
    groups: Sequence[Mapping[str, Any]]
    is_sharded: bool
    own_keys: Sequence[Any]
    is_lenient: bool


def check(given: Any, expected: Expected) -> list[str]:
    """What is wrong with a dict, in words; nothing if it fits."""
    if not isinstance(given, Mapping) or "state" not in given:
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        return [detail("state-missing", found=found)]
    numbers = [key for key in given["state"] if isinstance(key, int)]
    if numbers:
        return [detail("state-numbered", numbers=numbers[:3])]
    shapeless = [name for name in expected.names.every_name if not isinstance(given["state"].get(name, {}), Mapping)]
    if shapeless:
        found = type(given["state"][shapeless[0]]).__name__
        return [detail("state-no-dict", name=shapeless[0], found=found)]
    problems = [*_missing(given, expected), *_superfluous(given, expected), *_full_instead_of_sharded(given, expected)]
    elementwise = elementwise_keys(given["state"], expected.names.every_name)
    for unit in expected.names.units:
        problems.extend(_of_unit(given["state"], unit, expected, elementwise))
    return [*problems, *_outside(given["state"], expected)]


def _owned_names(expected: Expected) -> list[str]:
    return [name for group in expected.groups for p in group["params"] for name in expected.names.of[p]]


def _missing(given: Mapping[str, Any], expected: Expected) -> Iterable[str]:
    if "param_groups" not in given:
        return
    listed = {name: index for index, group in enumerate(given["param_groups"]) for name in group["params"]}
    outside = set(expected.names.outside.values()) if expected.is_lenient else set()
    for name in _owned_names(expected):
        if name not in listed and name not in outside:
            yield detail("in-no-group", name=name)
    for index, group in enumerate(expected.groups):
        names = [name for p in group["params"] for name in expected.names.of[p]]
        sources = sorted({listed[name] for name in names if name in listed})
        if len(sources) > 1:
            by_source = {source: next(name for name in names if listed.get(name) == source) for source in sources}
            yield detail("groups-differ", index=index, sources=sources, instances=list(by_source.values()))


def _superfluous(given: Mapping[str, Any], expected: Expected) -> Iterable[str]:
    owned = set(_owned_names(expected))
    listed = {name for group in given.get("param_groups", ()) for name in group["params"]}
    for name in dict.fromkeys([*listed, *given["state"]]):
        entries = given["state"].get(name)
        # Something of the user's own may be there, if it does not look like the states of a parameter.
        looks_owned = name in listed or name in expected.names.every_name or isinstance(entries, Mapping)
        if name not in owned and name not in expected.own_keys and looks_owned:
            yield detail("state-superfluous", name=name)


def _full_instead_of_sharded(given: Mapping[str, Any], expected: Expected) -> Iterable[str]:
    if not expected.is_sharded or all(unit.group is None for unit in expected.names.units):
        return ()
    return chunks.all_full(
        (f"optimizer state {key!r} of {name!r}", value)
        for name in sorted(expected.names.every_name)
        for key, value in (given["state"].get(name) or {}).items()
    )


def _of_unit(state: Mapping[str, Any], unit: UnitNames, expected: Expected, elementwise: set[str]) -> list[str]:
    owned = {parameter for group in expected.groups for parameter in group["params"]}
    problems: list[str] = []
    present = [name for name in unit.names if state.get(name)]
    for owner, numbers in unit.owners:
        for number in numbers if owner in owned else ():
            name = unit.names[number]
            if present and name not in state and owner.requires_grad and unit.shapes[number].numel():
                problems.append(detail("states-missing", name=name, first=present[0]))
            shape = None if unit.keeps_shapes else tuple(unit.shapes[number])
            for key, value in (state.get(name) or {}).items():
                where = f"optimizer state {key!r} of {name!r}"
                problems.extend(_of_value(value, where, shape, unit.group, expected.is_sharded))
    return problems or (_once_only(state, unit, elementwise) if unit.is_flat else [])


def _outside(state: Mapping[str, Any], expected: Expected) -> Iterable[str]:
    """Parameters outside of all units may have been in one when the dict was written."""
    group = expected.names.units[0].group
    for name in expected.names.outside.values():
        for key, value in (state.get(name) or {}).items():
            yield from _of_value(value, f"optimizer state {key!r} of {name!r}", None, group, expected.is_sharded)


def _of_value(
    value: Any, where: str, shape: tuple[int, ...] | None, group: Group | None, is_sharded: bool
) -> Iterable[str]:
    """One value: is it in the right form, and has it the right shape, if there is a right one?"""
    is_rows = chunks.local_rows(value) is not None
    if not is_rows and not isinstance(value, torch.Tensor):
        return
    if is_rows and not is_sharded:
        yield detail("full-expected", where=where, type=type(value).__name__)
    found = tuple(value.size())
    if shape is not None and found not in ((), shape):
        yield detail("shape-differs", where=where, shape=shape, found=found)
    elif is_rows:
        yield from chunks.misplaced_rows(value, where, group)


def _once_only(state: Mapping[str, Any], unit: UnitNames, elementwise: set[str]) -> list[str]:
    """A flat parameter has each state once: all parameters behind it must have the same ones, of equal value."""
    entries = {name: state[name] for name in unit.names if state.get(name)}
    if not entries:
        return []
    first, of_first = next(iter(entries.items()))
    problems = []
    for name, of_other in entries.items():
        for key in sorted({*of_first, *of_other}):
            if key not in of_first or key not in of_other:
                there, lacking = (first, name) if key in of_first else (name, first)
                problems.append(detail("state-lacking", key=key, lacking=lacking, there=there))
            elif not _agree(of_first[key], of_other[key], key in elementwise):
                problems.append(
                    detail(
                        "state-only-once", key=key, expected=of_first[key], first=first, found=of_other[key], name=name
                    )
                )
    return problems


def _agree(one: Any, other: Any, is_per_element: bool) -> bool:
    # Of what is per element only the dtype must be one.
    return getattr(one, "dtype", None) is getattr(other, "dtype", None) if is_per_element else same(one, other)


def elementwise_keys(state: Mapping[str, Any], every_name: set[str]) -> set[str]:
    """Keys of states that have a value for each element: those that are tensors with dimensions anywhere."""
    entries = [of for name, of in state.items() if name in every_name and isinstance(of, Mapping)]
    found = {key for of in entries for key, value in of.items() if getattr(value, "ndim", 0)}
    # Nothing but parameters without dimensions: a count of steps is the one thing that is not per element.
    return found or {key for of in entries for key in of if key != "step"}
