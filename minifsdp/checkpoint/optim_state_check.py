"""Does an optimizer's state dict fit? Asked before anything is made of it.

A dict that does not fit is worse than none: an optimizer copies what it is given, and the mistake shows up, if at all,
as a loss that is a little too high. Each complaint names the key, what was expected there and what was found; the rank
is added when the ranks compare their complaints.

Worked example, one unit with ``weight`` (2 x 3) and ``bias`` (3)::

    {"weight": {"exp_avg": 3 x 2}, ...}          expected shape (2, 3), found (3, 2)
    {"weight": {"step": 4}, "bias": {"step": 5}} expected one 'step' for a flat parameter, found 4 and 5
    {0: {...}}                                   expected names, found numbers: the dict of a plain optimizer

First each value is looked at by itself. If nothing is wrong so far, those of one flat parameter are compared with each
other, as *facts* (see ``optim_state_facts.py``): of averages the dtype, of a count of steps the value.

Nothing here is sent, and nothing is changed.

*In torch:* shapes and the values of a flat parameter are checked when they are used, halfway through.

Spec: OSD-LOAD-01 to OSD-LOAD-08.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from minifsdp.checkpoint import chunks
from minifsdp.checkpoint.codec import Form
from minifsdp.checkpoint.optim_state_facts import Facts, differences, facts_given, tensors_in
from minifsdp.checkpoint.optim_state_names import ParameterNames, UnitNames, parameters_of
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import detail


@dataclass(frozen=True)
class Target:
    """What a dict is read for: an optimizer over a model.

    Attributes:
        model: a wrapper, or a module with wrappers in it.
        groups: the optimizer's own, with parameters under ``"params"``.
        form: in which the dict is; with ``form.first_only`` the first rank's is read.
        by_name: whether the optimizer keys its state by the names that parameters have in the wrapped model.
        own_keys: keys of the user's own that the optimizer's state has; they may be in the dict, too.
        is_lenient: accept it if parameters outside of all units are not in the dict.
    """

    model: nn.Module
    groups: Sequence[Mapping[str, Any]]
    form: Form
    by_name: bool = False
    own_keys: Sequence[Any] = ()
    is_lenient: bool = False

    @cached_property
    def names(self) -> ParameterNames:
        """Of the model."""
        return ParameterNames(self.model)

    @cached_property
    def keys(self) -> dict[nn.Parameter, Any]:
        """Of the optimizer's parameters in its own state dict: numbers, counted over its groups, or names."""
        parameters = parameters_of(self.groups)
        current = self.names.current_names
        return {p: current[p] if self.by_name else number for number, p in enumerate(parameters)}


def check(given: Any, target: Target) -> list[str]:
    """What is wrong with a dict, in words; nothing if it fits."""
    if not isinstance(given, Mapping) or "state" not in given:
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        return [detail("state-missing", found=found)]
    state, names = given["state"], target.names
    numbers = [key for key in state if isinstance(key, int)]
    if numbers:
        return [detail("state-numbered", numbers=numbers[:3])]
    shapeless = [name for name in names.owners if not isinstance(state.get(name, {}), Mapping)]
    if shapeless:
        return [detail("state-no-dict", name=shapeless[0], found=type(state[shapeless[0]]).__name__)]
    units = list(zip(names.units, facts_given(names, state), strict=True))
    problems = [*_missing_from_groups(given, target), *_superfluous(given, target), *_misfits(state, target)]
    problems.extend(problem for unit, facts in units for problem in _missing(unit, facts, target))
    # Values are compared with each other when there is nothing wrong with them by themselves.
    return problems or [problem for unit, facts in units if unit.is_flat for problem in _once_only(unit, facts)]


def _missing_from_groups(given: Mapping[str, Any], target: Target) -> Iterator[str]:
    if "param_groups" not in given:
        return
    listed = {name: index for index, group in enumerate(given["param_groups"]) for name in group["params"]}
    optional = set(target.names.outside.values()) if target.is_lenient else set()
    for index, group in enumerate(target.groups):
        names = target.names.behind(group["params"])
        for name in names:
            if name not in listed and name not in optional:
                yield detail("in-no-group", name=name)
        instances = {listed[name]: name for name in reversed(names) if name in listed}
        if len(instances) > 1:
            sources = sorted(instances)
            yield detail("groups-differ", index=index, sources=sources, instances=[instances[s] for s in sources])


def _superfluous(given: Mapping[str, Any], target: Target) -> Iterator[str]:
    owned = {*target.names.behind(target.keys), *target.own_keys}
    listed = dict.fromkeys(parameters_of(given.get("param_groups", ())))
    for name in dict.fromkeys([*listed, *given["state"]]):
        # Something of the user's own may be there, if it does not look like the states of a parameter.
        entries = given["state"].get(name)
        looks_owned = name in listed or name in target.names.owners or isinstance(entries, Mapping)
        if name not in owned and looks_owned:
            yield detail("state-superfluous", name=name)


def _missing(unit: UnitNames, facts: Facts, target: Target) -> Iterator[str]:
    """If others of its unit have states, a parameter without them must say so by an empty entry."""
    present = [unit.names[number] for number, of_parameter in facts.items() if of_parameter]
    for number, owner in enumerate(unit.owners):
        is_stepped = owner in target.keys and owner.requires_grad and unit.shapes[number].numel()
        if present and number not in facts and is_stepped:
            yield detail("states-missing", name=unit.names[number], first=present[0])


# ---- values, one by one ---------------------------------------------------------------------------------------------


def _misfits(state: Mapping[str, Any], target: Target) -> Iterator[str]:
    """Is each value in the right form, and has it the right shape, if there is a right one?"""
    names, is_sharded = target.names, target.form.is_sharded
    # Parameters outside of all units may have been in one when the dict was written.
    places: dict[str, tuple[Any, Group | None]] = dict.fromkeys(names.owners, (None, names.units[0].group))
    for unit in names.units:
        shapes = [None if unit.keeps_shapes else tuple(shape) for shape in unit.shapes]
        places.update({name: (shape, unit.group) for name, shape in zip(unit.names, shapes, strict=True)})
    tensors = [(f"optimizer state {key!r} of {name!r}", name, value) for name, key, value in tensors_in(state, names)]
    for where, name, tensor in tensors:
        (shape, group), found = places[name], tuple(tensor.size())
        is_rows = chunks.local_rows(tensor) is not None
        if is_rows and not is_sharded:
            yield detail("full-expected", where=where, type=type(tensor).__name__)
        if shape is not None and found not in ((), shape):
            yield detail("shape-differs", where=where, shape=shape, found=found)
        elif is_rows:
            yield from chunks.misplaced_rows(tensor, where, group)
    if is_sharded:
        cut = {name for unit in names.units if unit.group is not None for name in unit.names}
        yield from chunks.all_full((where, tensor) for where, name, tensor in tensors if name in cut)


def _once_only(unit: UnitNames, facts: Facts) -> Iterator[str]:
    """A flat parameter has each state once: all parameters behind it must have the same ones, of equal value."""
    told = {unit.names[number]: of_parameter for number, of_parameter in facts.items() if of_parameter}
    for key, first, name in differences(told):
        there, other = (first, name) if key in told[first] else (name, first)
        if key not in told[other]:
            yield detail("state-lacking", key=key, lacking=other, there=there)
        else:
            expected, found = told[first][key], told[name][key]
            yield detail("state-only-once", key=key, expected=expected, first=first, found=found, name=name)
