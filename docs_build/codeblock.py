"""The code of one row, with a number before each line, and recording statements folded.

A number is a link to its own line, ``unit.html#L172``. The style sheet draws it from ``data-n``, so neither a selection
nor the search contains it.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import groupby

__all__ = ["code_block"]


def code_block(numbers: list[int], code: list[str], recording: Set[int] = frozenset()) -> str:
    """The HTML of some lines.

    Args:
        numbers: of the lines, from 1.
        code: all lines of the module as HTML.
        recording: numbers of the lines that only record.
    """
    parts = [(list(group), folds) for folds, group in groupby(numbers, lambda number: number in recording)]
    return "".join(_part(part, code, folds=folds) for part, folds in parts)


def _part(numbers: list[int], code: list[str], *, folds: bool) -> str:
    shown = "\n".join(f'<a id="L{n}" href="#L{n}" data-n="{n}"></a>{code[n - 1]}' for n in numbers)
    block = f'<div class="highlight"><pre><code>{shown}\n</code></pre></div>'
    if not folds:
        return block
    first, last = numbers[0], numbers[-1]
    where = f"line {first} only records" if first == last else f"lines {first} to {last} only record"
    return f'<details class="sbs-fold"><summary>{where}</summary>{block}</details>'
