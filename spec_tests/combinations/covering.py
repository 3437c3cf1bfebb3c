"""A few rows in which all values meet that are wanted together.

It is greedy: a row starts with the first values that have not met yet; for each other option, in random order, it takes
the value that lets most of what is left meet. That is not the smallest table, but none is missing in it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Row", "Values", "covering", "meetings"]

# By the name of an option, its value.
Row = dict[str, str]
Values = frozenset[tuple[str, str]]


def covering(
    options: Mapping[str, Sequence[str]],
    wanted: Iterable[Values],
    is_allowed: Callable[[Mapping[str, str]], bool],
    seed: int = 0,
) -> list[Row]:
    """Rows that have whatever is wanted; the same for the same seed.

    Args:
        options: the values of each option.
        wanted: which of them meet; see `meetings`.
        is_allowed: whether these values of some options may be together. Each option needs a value that any two rows
            of values may have beside them.
        seed: another one draws another table.
    """
    dice = random.Random(seed)
    missing = dict.fromkeys(wanted)
    sizes = sorted({len(values) for values in missing})
    rows = []
    while missing:
        row = dict(sorted(next(iter(missing))))
        for name in dice.sample(list(options), len(options)):
            if name not in row:
                possible = [value for value in options[name] if is_allowed({**row, name: value})]
                dice.shuffle(possible)
                row[name] = max(possible, key=lambda value: _gain(name, value, row, missing, sizes))
        for values in _together(row, sizes):
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


def _gain(name: str, value: str, row: Row, missing: Mapping[Values, None], sizes: Sequence[int]) -> int:
    """How much of what is missing this value would complete."""
    others = _together(row, [size - 1 for size in sizes])
    return sum(frozenset((*some, (name, value))) in missing for some in others)


def _together(row: Row, sizes: Sequence[int]) -> Iterator[tuple[tuple[str, str], ...]]:
    return itertools.chain.from_iterable(itertools.combinations(row.items(), size) for size in sizes)
