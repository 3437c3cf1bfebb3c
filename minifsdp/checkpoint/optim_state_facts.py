"""What optimizer states there are, before any of them is sent: all that writing and reading have to know beforehand.

A gather needs everybody, and needs everybody to mean the same. Whether a rank has a state at all is nothing that the
others could know: an empty slice has none, a unit that never saw a gradient has none anywhere, and a user may have
given the optimizer other parameters on rank 3. So states are described before they are sent, by *facts*: of a state
with a value for each element its dtype, of anything else the value itself.

Writing, the ranks of each shard group first tell each other their facts. Worked example, Adam, one unit with ``weight``
and ``bias``, original parameters; rank 0 has no element of the bias::

    rank 0 says    weight: {step: 1, exp_avg: per element, float32}
    rank 1 says    weight: {step: 1, exp_avg: per element, float32}    bias: {step: 1, exp_avg: ...}
    all know       both have states; rank 0 was not asked about the bias

Were rank 0's step another one, or its weight without states, all ranks would refuse, and say which rank said what.

A thousand parameters have a thousand times the same facts. They are kept as one object and therefore sent once, with a
number for each parameter; a message is some kilobytes.

Reading, the facts are those of the given dict; whoever has no dict is told them by the first rank. There a value
without dimensions is ambiguous for a parameter without dimensions: is it per element or meant for the whole? The other
parameters decide: what is a tensor with dimensions anywhere is per element.

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
from minifsdp.engine.mesh import Mesh
from minifsdp.engine.messages import detail, rank_of_this_process

# By parameter of the optimizer, by name of the state.
States = Mapping[nn.Parameter, Mapping[str, Any]]
# For one unit: by number of the parameter, by name of the state, what is known of it, or what became of it.
Facts = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class PerElement:
    """A state with one value for each element of the parameter; all that other ranks need to know of it."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Shaped(PerElement):
    """A tensor with a shape of its own. It cannot be cut, so only whole parameters may have one."""

    shape: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Number:
    """A state that is a tensor without dimensions: one value for the whole parameter."""

    dtype: torch.dtype
    value: Any

    def __repr__(self) -> str:
        return f"{self.value} ({self.dtype})"


def each_state(facts: Facts, values_of: Callable[[str, torch.dtype, list[int]], Mapping[int, Any]]) -> Facts:
    """What becomes of a unit's states, by number and name: of one that is meant for a whole parameter a copy.

    Args:
        facts: what there is.
        values_of: asked for those with a value for each element, one after the other: given name, dtype and numbers
            of the parameters whose values travel in one row, it returns by number what becomes of them. Usually a
            state is of one dtype; but an optimizer may treat the biases of a unit otherwise than its weights.
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
    """A value in memory of its own: an optimizer counts its steps in place."""
    if isinstance(value, Number):
        return torch.tensor(value.value, dtype=value.dtype)
    if isinstance(value, torch.Tensor):
        return value.to("cpu" if offload else value.device, copy=True)
    # A list of tensors, too: some optimizers keep a history.
    return copy.deepcopy(value)


def _facts(entries: Mapping[str, Any], shape: Sequence[int], elementwise: Container[str]) -> dict[str, Any]:
    """A state is told by its dtype if it has a value for each element, else by its value.

    Args:
        entries: the states.
        shape: of what they belong to.
        elementwise: those that are meant per element if neither they nor what they belong to has dimensions.
    """
    facts: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor) or (value.ndim == 0 and (shape or key not in elementwise)):
            facts[key] = value
        else:
            found = tuple(value.size())
            facts[key] = PerElement(value.dtype) if found == tuple(shape) else Shaped(value.dtype, found)
    return facts


# ---- of a dict that is read -----------------------------------------------------------------------------------------


def facts_given(names: ParameterNames, state: Mapping[str, Any]) -> list[Facts]:
    """For each unit what a dict has of its parameters, by number. Nothing is sent."""
    tensors = [(key, tensor) for _, key, tensor in tensors_in(state, names)]
    # Nothing but parameters without dimensions: a count of steps is the one thing that is not per element.
    elementwise = {key for key, tensor in tensors if tensor.ndim} or {key for key, _ in tensors if key != "step"}
    return [
        {n: _facts(state[name], unit.shapes[n], elementwise) for n, name in enumerate(unit.names) if name in state}
        for unit in names.units
    ]


def tensors_in(state: Mapping[str, Any], names: ParameterNames) -> Iterator[tuple[str, str, torch.Tensor]]:
    """All tensors that a dict has for parameters, with the names of parameter and state."""
    for name in names.owners:
        for key, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                yield name, key, value


# ---- of the ranks that write one ------------------------------------------------------------------------------------


def facts_of_all_ranks(names: ParameterNames, states: States) -> tuple[list[Facts], list[str]]:
    """For each unit what is known of the states of its parameters, by number; the same on all ranks of its shard group.

    Args:
        names: of the model.
        states: of this rank's optimizer.

    Returns:
        The facts; and what does not fit together, in words.
    """
    known: dict[Any, dict[str, Any]] = {}
    mine: list[Facts] = []
    for unit in names.units:
        told = {owner: _once(_facts_here(owner, states[owner]), known) for owner in {*unit.owners} & states.keys()}
        mine.append({number: told[owner] for number, owner in enumerate(unit.owners) if owner in told})
    # Replicas hold the same pieces: what the own shard group says is enough.
    sharers = agreement.groups_of(Mesh(unit.mesh.shard, None) for unit in names.units)
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
    """The very same object for equal facts: a thousand parameters have the same states, and that is sent only once."""
    try:
        # With types, because 1 and 1.0 and True are equal.
        return known.setdefault(tuple((key, type(fact), fact) for key, fact in facts.items()), facts)
    except TypeError:
        # Some state of the user's own that has no hash.
        return facts


def _merged(unit: UnitNames, by_rank: Mapping[int, Facts], problems: list[str]) -> Facts:
    ranks = [rank_of_this_process()] if unit.group is None else list(unit.group.ranks)
    merged: Facts = {}
    for number, name in enumerate(unit.names):
        # A rank without an element of the parameter may have a state, of nothing, or none: it is not asked.
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
    """What those ranks say differently about one parameter that have a part of it."""
    lacking = [rank for rank in holders if rank not in told]
    if lacking:
        yield detail("state-on-some-ranks", name=name, having=list(told), lacking=lacking)
    for key, first, rank in differences(told) if holders and not lacking else ():
        expected, found = told[first].get(key), told[rank].get(key)
        yield detail("state-differs", key=key, name=name, expected=expected, first=first, found=found, rank=rank)


# ---- comparing ------------------------------------------------------------------------------------------------------


def differences(told: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Where facts are not those that were told first: the name of the state, and who has told the two of them."""
    speakers = list(told)
    for other in speakers[1:]:
        first = speakers[0]
        expected, found = told[first], told[other]
        for key in sorted({*expected, *found}):
            if key not in expected or key not in found or not _same(expected[key], found[key]):
                yield key, first, other


def _same(one: Any, other: Any) -> bool:
    """Whether two values that are meant for a whole parameter are equal; they may be lists or dicts of tensors."""
    (mine, shape), (theirs, other_shape) = tree_flatten(one), tree_flatten(other)
    return shape == other_shape and all(_equal(*pair) for pair in zip(mine, theirs, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(one == other)
