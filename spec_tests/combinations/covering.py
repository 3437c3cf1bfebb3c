"""Draws a few rows that together contain all wanted combinations of values.

The algorithm is greedy: a row starts with the first missing combination. For each other option, in random order, it
takes the value that adds the most missing combinations. The table is not the smallest, but it is complete.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Row", "Values", "covering", "meetings"]

# The value of each option, by name.
Row = dict[str, str]
Values = frozenset[tuple[str, str]]


def covering(
    options: Mapping[str, Sequence[str]],
    wanted: Iterable[Values],
    is_allowed: Callable[[Mapping[str, str]], bool],
    seed: int = 0,
) -> list[Row]:
    """Rows that contain all ``wanted`` combinations. The same seed gives the same rows.

    Args:
        options: the values of each option.
        wanted: the combinations that must occur in some row; see `meetings`.
        is_allowed: whether these values of some options may be combined. Each option needs a value that is allowed
            with any values of two other options.
        seed: the seed of the random order.
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
    """All allowed combinations of values of ``strength`` different options."""
    for names in itertools.combinations(options, strength):
        for values in itertools.product(*(options[name] for name in names)):
            if is_allowed(dict(zip(names, values, strict=True))):
                yield frozenset(zip(names, values, strict=True))


def _gain(name: str, value: str, row: Row, missing: Mapping[Values, None], sizes: Sequence[int]) -> int:
    """The number of missing combinations that this value would add to the row."""
    others = _together(row, [size - 1 for size in sizes])
    return sum(frozenset((*some, (name, value))) in missing for some in others)


def _together(row: Row, sizes: Sequence[int]) -> Iterator[tuple[tuple[str, str], ...]]:
    return itertools.chain.from_iterable(itertools.combinations(row.items(), size) for size in sizes)
