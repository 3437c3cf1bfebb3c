"""Checks whether an optimizer's state dict fits, before any of it is used.

Loading a dict that does not fit is worse than an error: an optimizer copies what it is given, and the mistake shows up,
if at all, as a slightly higher loss. Each problem names the key, the expected value and the value found. The ranks are
added when the ranks compare their problems.

Worked example, one unit with ``weight`` (2 x 3) and ``bias`` (3)::

    {"weight": {"exp_avg": 3 x 2}, ...}          expected shape (2, 3), found (3, 2)
    {"weight": {"step": 4}, "bias": {"step": 5}} expected one 'step' for a flat parameter, found 4 and 5
    {0: {...}}                                   expected names, found numbers: the dict of a plain optimizer

Each value is first checked separately. If no problem is found, the states of the parameters in one flat parameter are
compared as *facts* (see ``optim_state_facts.py``): the dtype of averages, the value of a step counter.

The check communicates nothing and changes nothing.

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
    """The optimizer and the model that a dict is loaded for.

    Attributes:
        model: a wrapper, or a module that contains wrappers.
        groups: the optimizer's own groups, with parameters under ``"params"``.
        form: the form of the dict; with ``form.first_only`` only the first rank's dict is read.
        by_name: whether the optimizer keys its state by the names that parameters have in the wrapped model.
        own_keys: custom keys in the optimizer's state; the dict may contain them, too.
        is_lenient: accept a dict that lacks parameters outside of all units.
    """

    model: nn.Module
    groups: Sequence[Mapping[str, Any]]
    form: Form
    by_name: bool = False
    own_keys: Sequence[Any] = ()
    is_lenient: bool = False

    @cached_property
    def names(self) -> ParameterNames:
        """The parameter names of the model."""
        return ParameterNames(self.model)

    @cached_property
    def keys(self) -> dict[nn.Parameter, Any]:
        """The keys of the parameters in the optimizer's own state dict: numbers, counted over its groups, or names."""
        parameters = parameters_of(self.groups)
        current = self.names.current_names
        return {p: current[p] if self.by_name else number for number, p in enumerate(parameters)}


def check(given: Any, target: Target) -> list[str]:
    """Describes each problem of a dict; the list is empty if the dict fits."""
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
    # Values are compared with each other only if each of them is valid.
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
        # Custom entries are allowed if they do not look like the states of a parameter.
        entries = given["state"].get(name)
        looks_owned = name in listed or name in target.names.owners or isinstance(entries, Mapping)
        if name not in owned and looks_owned:
            yield detail("state-superfluous", name=name)


def _missing(unit: UnitNames, facts: Facts, target: Target) -> Iterator[str]:
    """If other parameters of the unit have states, a parameter without states needs an empty entry."""
    present = [unit.names[number] for number, of_parameter in facts.items() if of_parameter]
    for number, owner in enumerate(unit.owners):
        is_stepped = owner in target.keys and owner.requires_grad and unit.shapes[number].numel()
        if present and number not in facts and is_stepped:
            yield detail("states-missing", name=unit.names[number], first=present[0])


# ---- values, one by one ---------------------------------------------------------------------------------------------


def _misfits(state: Mapping[str, Any], target: Target) -> Iterator[str]:
    """Whether each value has the right form and, if the shape is fixed, the right shape."""
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
    """A flat parameter has each state once, so all parameters in it must have the same states with equal values."""
    told = {unit.names[number]: of_parameter for number, of_parameter in facts.items() if of_parameter}
    for key, first, name in differences(told):
        there, other = (first, name) if key in told[first] else (name, first)
        if key not in told[other]:
            yield detail("state-lacking", key=key, lacking=other, there=there)
        else:
            expected, found = told[first][key], told[name][key]
            yield detail("state-only-once", key=key, expected=expected, first=first, found=found, name=name)
