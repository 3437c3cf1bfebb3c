"""A few rows in which every so many values of different options meet.

It is greedy: a row starts with the first values that have not met yet; for each other option, in random order, it takes
the value that lets most of what is left meet. That is not the smallest table, but none is missing in it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Row", "covering", "meetings"]

# By the name of an option, its value.
Row = dict[str, str]
Values = frozenset[tuple[str, str]]


def covering(
    options: Mapping[str, Sequence[str]], strength: int, is_allowed: Callable[[Mapping[str, str]], bool], seed: int = 0
) -> list[Row]:
    """Rows in which every ``strength`` values meet that may; the same for the same seed.

    Args:
        options: the values of each option.
        strength: how many of them meet.
        is_allowed: whether these values of some options may be together. Each option needs a value that any two rows
            of values may have beside them.
        seed: another one draws another table.
    """
    dice = random.Random(seed)
    missing = dict.fromkeys(meetings(options, strength, is_allowed))
    rows = []
    while missing:
        row = dict(sorted(next(iter(missing))))
        for name in dice.sample(list(options), len(options)):
            if name not in row:
                row[name] = _best(name, options[name], row, missing, strength, is_allowed, dice)
        for values in itertools.combinations(row.items(), strength):
            missing.pop(frozenset(values), None)
        rows.append({name: row[name] for name in options})
    return rows


def meetings(
    options: Mapping[str, Sequence[str]], strength: int, is_allowed: Callable[[Mapping[str, str]], bool]
) -> Iterator[Values]:
    """All values of so many different options that may be together."""
    for names in itertools.combinations(options, strength):
        for values in itertools.product(*(options[name] for name in names)):
            if is_allowed(dict(zip(names, values, strict=True))):
                yield frozenset(zip(names, values, strict=True))


def _best(
    name: str,
    values: Sequence[str],
    row: Row,
    missing: Mapping[Values, None],
    strength: int,
    is_allowed: Callable[[Mapping[str, str]], bool],
    dice: random.Random,
) -> str:
    def gain(value: str) -> int:
        others = itertools.combinations(row.items(), strength - 1)
        return sum(frozenset((*some, (name, value))) in missing for some in others)

    possible = [value for value in dice.sample(values, len(values)) if is_allowed({**row, name: value})]
    return max(possible, key=gain)
