"""Writes numbers into the texts of problems: ``{peak:GB}`` becomes ``61.03 GB``.

====================  ================================================================================
``{x}``               a number with at most four digits that are not zero, or any other value as text
``{x:GB}``            bytes in a unit of `UNITS`, with its name; seconds and rates likewise
``{x:billion}``       a count in billions; ``{x:%}`` in percent
``{choices:list}``    values as in ``1, 2 or 4``
``{name:program}``    the source of a program, and the command that runs it
``{name:output}``     the recorded output of each rank
====================  ================================================================================
"""

import math
import string
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from docs_build.problems import recorded

# The figures of a statement, as attributes, and those of an answer.
Givens = SimpleNamespace
Values = dict[str, Any]
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "s": 1, "ms": 1e-3, "GB/s": 1e9}
UNITS |= {"TFLOP": 1e12, "TFLOP/s": 1e12, "million": 1e6, "billion": 1e9, "%": 0.01}


def number(value: float) -> str:
    """A number with commas. A whole number has all digits, any other number has at most four that are not zero."""
    # A quotient of whole numbers can differ from a whole number by a rounding error.
    if abs(value - round(value)) <= 1e-9 * abs(value):
        return f"{round(value):,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:,.0f}"


def written(template: str, values: Mapping[str, Any]) -> str:
    """The template with values instead of placeholders.

    Raises:
        KeyError: a placeholder names no value.
        ValueError: a format is unknown.
    """
    return _Writer().vformat(template, (), values)


class _Writer(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """A value as text."""
        if format_spec in UNITS:
            text = number(value / UNITS[format_spec])
            return f"{text}%" if format_spec == "%" else f"{text} {format_spec}"
        if format_spec == "list":
            *others, last = map(number, value)
            return f"{', '.join(others)} or {last}"
        if format_spec == "program":
            return recorded.program(value)
        if format_spec == "output":
            return recorded.output(value)
        if format_spec:
            raise ValueError(f"unknown format {format_spec!r}; there are list, program, output, {', '.join(UNITS)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return number(value) if is_number else str(value)
