"""Descriptions of optimizer states, which ranks compare before they send any state.

An all-gather needs all ranks of a group, with equal dtypes. A rank cannot know whether another rank has a state: a rank
with no element of a parameter has none, a unit without gradients has none on any rank, and a user may have passed
different parameters to the optimizer on rank 3. So each state is first described by a *fact*: for a state with one
value per element this is its dtype, for any other state its value.

When saving, the ranks of each shard group exchange their facts. Worked example, Adam, one unit with ``weight`` and
``bias``, original parameters; rank 0 has no element of the bias::

    facts of rank 0    weight: {step: 1, exp_avg: per element, float32}
    facts of rank 1    weight: {step: 1, exp_avg: per element, float32}    bias: {step: 1, exp_avg: ...}
    result             both have states; for the bias, only the facts of rank 1 count

If rank 0 had a different step, or no state for the weight, all ranks would raise an error with the facts of each rank.

A thousand parameters usually have equal facts. Equal facts are stored as one object, so pickle writes them once, and
each parameter adds a reference. A message has a few kilobytes.

When loading, the facts come from the given dict; ranks without a dict receive them from the first rank. A 0-d value for
a 0-d parameter is ambiguous: it can be per element or for the whole parameter. The other parameters decide: a state
that has dimensions for any parameter is per element.

*In torch:* the same for original parameters, unit by unit; for flat ones every rank is compared with rank 0.

Spec: OSD-01, OSD-08.
"""

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from minifsdp.checkpoint import agreement
from minifsdp.checkpoint.optim_state_names import ParameterNames, UnitNames
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import detail, rank_of_this_process

# By parameter of the optimizer, by name of the state.
States = Mapping[nn.Parameter, Mapping[str, Any]]
# For one unit: by number of the parameter and name of the state, its fact or its converted value.
Facts = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class PerElement:
    """A state with one value per element of the parameter. Other ranks only need its dtype."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Shaped(PerElement):
    """A tensor with a shape of its own. It cannot be sharded, so only unsharded parameters may have one."""

    shape: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Number:
    """A state that is a 0-d tensor: one value for the whole parameter."""

    dtype: torch.dtype
    value: Any

    def __repr__(self) -> str:
        return f"{self.value} ({self.dtype})"


def each_state(facts: Facts, values_of: Callable[[str, torch.dtype, list[int]], Mapping[int, Any]]) -> Facts:
    """Converts the states of a unit, by number and name. A state that applies to a whole parameter is copied.

    Args:
        facts: the facts of the unit.
        values_of: converts one state with a value per element; called for one state after the other. Gets the name, the
            dtype and the numbers of the parameters that share one bucket, and returns a result for each number. Usually
            a state has one dtype, but an optimizer may use another dtype for the biases than for the weights.
    """
    result = {number: {key: copied(fact) for key, fact in of.items()} for number, of in facts.items()}
    rows: dict[tuple[str, torch.dtype], list[int]] = {}
    for number, of_parameter in facts.items():
        for key, fact in of_parameter.items():
            if isinstance(fact, PerElement):
                rows.setdefault((key, fact.dtype), []).append(number)
    for (key, dtype), numbers in rows.items():
        for number, value in values_of(key, dtype, numbers).items():
            result[number][key] = value
    return result


def copied(value: Any, *, offload: bool = False) -> Any:
    """A copy of a value in its own memory, because an optimizer increments its step counter in place."""
    if isinstance(value, Number):
        return torch.tensor(value.value, dtype=value.dtype)
    if isinstance(value, torch.Tensor):
        return value.to("cpu" if offload else value.device, copy=True)
    # Also copies lists of tensors: some optimizers keep a history.
    return copy.deepcopy(value)


def _facts(entries: Mapping[str, Any], shape: Sequence[int], elementwise: Container[str]) -> dict[str, Any]:
    """The facts of one parameter: the dtype of a state with a value per element, otherwise the value.

    Args:
        entries: the states.
        shape: of the parameter.
        elementwise: names of states that are per element if both the state and the parameter are 0-d.
    """
    facts: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor) or (value.ndim == 0 and (shape or key not in elementwise)):
            facts[key] = value
        else:
            found = tuple(value.size())
            facts[key] = PerElement(value.dtype) if found == tuple(shape) else Shaped(value.dtype, found)
    return facts


# ---- facts of a dict that is loaded ---------------------------------------------------------------------------------


def facts_given(names: ParameterNames, state: Mapping[str, Any]) -> list[Facts]:
    """The facts of a dict for each unit, by parameter number. Nothing is communicated."""
    tensors = [(key, tensor) for _, key, tensor in tensors_in(state, names)]
    # If all parameters are 0-d, only the step counter is not per element.
    elementwise = {key for key, tensor in tensors if tensor.ndim} or {key for key, _ in tensors if key != "step"}
    return [
        {n: _facts(state[name], unit.shapes[n], elementwise) for n, name in enumerate(unit.names) if name in state}
        for unit in names.units
    ]


def tensors_in(state: Mapping[str, Any], names: ParameterNames) -> Iterator[tuple[str, str, torch.Tensor]]:
    """All tensors in a dict's parameter states, with the names of the parameter and the state."""
    for name in names.owners:
        for key, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                yield name, key, value


# ---- facts of the ranks that save one -------------------------------------------------------------------------------


def facts_of_all_ranks(names: ParameterNames, states: States) -> tuple[list[Facts], list[str]]:
    """The facts of each unit, by parameter number; the same on all ranks of its shard group.

    Args:
        names: of the model.
        states: of this rank's optimizer.

    Returns:
        The facts, and a description of each mismatch between ranks.
    """
    known: dict[Any, dict[str, Any]] = {}
    mine: list[Facts] = []
    for unit in names.units:
        told = {owner: _once(_facts_here(owner, states[owner]), known) for owner in {*unit.owners} & states.keys()}
        mine.append({number: told[owner] for number, owner in enumerate(unit.owners) if owner in told})
    # Replicas have equal shards, so the facts of this rank's shard group are enough.
    sharers = agreement.groups_of(MeshGroups(unit.mesh.shard, None) for unit in names.units)
    by_rank = agreement.tell(sharers, mine)
    problems: list[str] = []
    merged = [
        _merged(unit, {rank: told[index] for rank, told in by_rank.items()}, problems)
        for index, unit in enumerate(names.units)
    ]
    return merged, problems


def _facts_here(owner: nn.Parameter, entries: Mapping[str, Any]) -> dict[str, Any]:
    facts = _facts(entries, owner.shape, elementwise=entries)
    numbers = {key: Number(fact.dtype, fact.item()) for key, fact in facts.items() if isinstance(fact, torch.Tensor)}
    return {**facts, **numbers}


def _once(facts: dict[str, Any], known: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Returns one shared object for equal facts, so that the facts of a thousand parameters are sent only once."""
    try:
        # Types are part of the key, because 1, 1.0 and True are equal.
        return known.setdefault(tuple((key, type(fact), fact) for key, fact in facts.items()), facts)
    except TypeError:
        # A custom state that is not hashable.
        return facts


def _merged(unit: UnitNames, by_rank: Mapping[int, Facts], problems: list[str]) -> Facts:
    ranks = [rank_of_this_process()] if unit.group is None else list(unit.group.ranks)
    merged: Facts = {}
    for number, name in enumerate(unit.names):
        # A rank without an element of the parameter may have an empty state or none, so it is not compared.
        holders = [rank for index, rank in enumerate(ranks) if unit.has_part(index, number)]
        told = {rank: by_rank[rank][number] for rank in holders or ranks if number in by_rank[rank]}
        if not told:
            continue
        merged[number] = next(iter(told.values()))
        problems.extend(_differences(name, holders, told))
        for key, fact in merged[number].items():
            if isinstance(fact, Shaped) and not unit.keeps_shapes:
                problems.append(detail("state-unfit", key=key, name=name, shape=fact.shape))
    return merged


def _differences(name: str, holders: Sequence[int], told: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """The mismatches between ranks for one parameter. Only ranks with an element of it are compared."""
    lacking = [rank for rank in holders if rank not in told]
    if lacking:
        yield detail("state-on-some-ranks", name=name, having=list(told), lacking=lacking)
    for key, first, rank in differences(told) if holders and not lacking else ():
        expected, found = told[first].get(key), told[rank].get(key)
        yield detail("state-differs", key=key, name=name, expected=expected, first=first, found=found, rank=rank)


# ---- comparing ------------------------------------------------------------------------------------------------------


def differences(told: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """The states whose facts differ from the first ones: the state's name, and the keys of the two facts."""
    speakers = list(told)
    for other in speakers[1:]:
        first = speakers[0]
        expected, found = told[first], told[other]
        for key in sorted({*expected, *found}):
            if key not in expected or key not in found or not _same(expected[key], found[key]):
                yield key, first, other


def _same(one: Any, other: Any) -> bool:
    """Whether two values for a whole parameter are equal; they may be lists or dicts of tensors."""
    (mine, shape), (theirs, other_shape) = tree_flatten(one), tree_flatten(other)
    return shape == other_shape and all(_equal(*pair) for pair in zip(mine, theirs, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(one == other)
