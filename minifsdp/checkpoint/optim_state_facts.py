"""What optimizer states there are, before any of them is sent: the conversation that precedes the gathers.

A gather needs everybody, and needs everybody to mean the same. Whether a rank has a state at all is nothing that the
others could know: an empty slice has none, a unit that never saw a gradient has none anywhere, and a user may have
given the optimizer other parameters on rank 3. So the ranks of each shard group first tell each other *facts*: of a
state with a value for each element its dtype, of anything else the value itself.

Worked example, Adam, one unit with ``weight`` and ``bias``, original parameters; rank 0 has no element of the bias::

    rank 0 says    weight: {step: 1, exp_avg: per element, float32}
    rank 1 says    weight: {step: 1, exp_avg: per element, float32}    bias: {step: 1, exp_avg: ...}
    all know       both have states; rank 0 was not asked about the bias

Were rank 0's step another one, or its weight without states, all ranks would refuse, and say which rank said what.

A thousand parameters have a thousand times the same facts. They are kept as one object and therefore sent once, with a
number for each parameter; a message is some kilobytes.

*In torch:* the same for original parameters, unit by unit; for flat ones every rank is compared with rank 0.

Spec: OSD-01, OSD-08.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from minifsdp.checkpoint import agreement
from minifsdp.checkpoint.optim_state_names import ParameterNames, UnitNames
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.messages import detail, rank_of_this_process

# For one unit: by number of the parameter, by name of the state.
Facts = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class PerElement:
    """A state with one value for each element of the parameter; all that other ranks need to know of it."""

    dtype: torch.dtype


@dataclass(frozen=True, repr=False)
class Number:
    """A state that is a tensor without dimensions: one value for the whole parameter."""

    dtype: torch.dtype
    value: Any

    def __repr__(self) -> str:
        return f"{self.value} ({self.dtype})"


@dataclass(frozen=True)
class Unfit:
    """A tensor that is neither per element nor without dimensions, so that it is not known how it is cut."""

    shape: tuple[int, ...]


def _facts_of_owner(unit: UnitNames, owner: nn.Parameter, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A state is told by its dtype if it has a value for each element, and by its value if it has one."""
    facts: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            facts[key] = value
        elif value.shape == owner.shape and (value.ndim > 0 or unit.keeps_shapes):
            facts[key] = PerElement(value.dtype)
        elif value.ndim == 0:
            facts[key] = Number(value.dtype, value.item())
        else:
            facts[key] = PerElement(value.dtype) if unit.keeps_shapes else Unfit(tuple(value.shape))
    return facts


def facts_of_all_ranks(
    names: ParameterNames,
    states: Mapping[nn.Parameter, Mapping[str, Any]],
    groups: Sequence[Group],
    problems: Sequence[str] = (),
) -> list[Facts]:
    """For each unit what is known of the states of its parameters, by number; the same on all ranks of its shard group.

    Args:
        names: of the model.
        states: of this rank's optimizer.
        groups: who must agree.
        problems: what this rank has found out before.

    Raises:
        StateDictMismatchError: some rank has a problem, or states do not fit together; on all ranks.
    """
    mine: list[Facts] = []
    known: dict[Any, dict[str, Any]] = {}
    for unit in names.units:
        described = [
            (numbers, _facts_of_owner(unit, owner, states[owner])) for owner, numbers in unit.owners if owner in states
        ]
        mine.append({number: _once(facts, known) for numbers, facts in described for number in numbers})
    # Columns hold the same pieces: what the own row says is enough.
    rows = agreement.groups_of(Mesh(unit.mesh.shard, None) for unit in names.units)
    by_rank = agreement.tell(rows, mine)
    found: list[str] = []
    merged = [
        _merged(unit, {rank: told[index] for rank, told in by_rank.items()}, found)
        for index, unit in enumerate(names.units)
    ]
    # A rank without keys seems to lack all states; what it says itself comes first.
    agreement.refuse_together(groups, [*problems, *found])
    return merged


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
        told = {rank: by_rank[rank].get(number) for rank in holders or ranks}
        facts = next((facts for facts in told.values() if facts is not None), None)
        if facts is None:
            continue
        merged[number] = facts
        if holders:
            problems.extend(_differences(name, told))
        for key, fact in facts.items():
            if isinstance(fact, Unfit):
                problems.append(detail("state-unfit", key=key, name=name, shape=fact.shape))
    return merged


def _differences(name: str, told: Mapping[int, dict[str, Any] | None]) -> list[str]:
    """What the ranks say differently about one parameter."""
    lacking = [rank for rank, facts in told.items() if facts is None]
    if lacking:
        having = [rank for rank in told if rank not in lacking]
        return [detail("state-on-some-ranks", name=name, having=having, lacking=lacking)]
    (first, expected), *others = [(rank, facts) for rank, facts in told.items() if facts is not None]
    return [
        detail(
            "state-differs",
            key=key,
            name=name,
            expected=expected.get(key),
            first=first,
            found=facts.get(key),
            rank=rank,
        )
        for rank, facts in others
        for key in sorted({*expected, *facts})
        if key not in expected or key not in facts or not same(expected[key], facts[key])
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two values that are meant for a whole parameter are equal; they may be lists or dicts of tensors."""
    (mine, shape), (theirs, other_shape) = tree_flatten(one), tree_flatten(other)
    return shape == other_shape and all(_equal(*pair) for pair in zip(mine, theirs, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other)
