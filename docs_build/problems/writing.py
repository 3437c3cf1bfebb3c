"""Writes numbers into the texts of problems, which are templates of Jinja: ``{peak|GB}`` becomes ``61.03 GB``.

========================  =========================================================================
``{x}``                   a number with at most four digits that are not zero, or any other value
``{x|GB}``                bytes in a unit of `UNITS`, with its name; seconds and rates likewise
``{x|billion}``           a count in billions; ``{x|percent}`` in percent
``{(after - before)|GB}`` an expression
``{choices|list_of}``     values as in ``1, 2 or 4``
``{name|program}``        the source of a program, and the command that runs it
``{name|output}``         the recorded output of each rank
========================  =========================================================================
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import jinja2

from docs_build.problems import recorded

# The figures of a statement, as attributes, and those of an answer.
Givens = SimpleNamespace
Values = dict[str, Any]
# By the name in a template: the size of a unit, and its name in a text.
UNITS = {"MB": (1e6, " MB"), "GB": (1e9, " GB"), "s": (1, " s"), "ms": (1e-3, " ms"), "percent": (0.01, "%")}
UNITS |= {"million": (1e6, " million"), "billion": (1e9, " billion"), "GB_per_s": (1e9, " GB/s")}
UNITS |= {"TFLOP": (1e12, " TFLOP"), "TFLOP_per_s": (1e12, " TFLOP/s")}


def number(value: float) -> str:
    """A number with commas. A whole number has all digits, any other number has at most four that are not zero."""
    # A quotient of whole numbers can differ from a whole number by a rounding error.
    if abs(value - round(value)) <= 1e-9 * abs(value):
        return f"{round(value):,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:,.0f}"


def shown(value: Any, unit: str = "") -> Any:
    """A number as text, in a unit of `UNITS`; any other value is returned."""
    size, name = UNITS.get(unit, (1, ""))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number(value / size) + name if is_number else value


def list_of(values: Iterable[float]) -> str:
    """Values as a list in a sentence."""
    *others, last = map(number, values)
    return f"{', '.join(others)} or {last}"


TEMPLATES = jinja2.Environment(
    variable_start_string="{",
    variable_end_string="}",
    undefined=jinja2.StrictUndefined,
    finalize=shown,
)
TEMPLATES.filters |= {unit: partial(shown, unit=unit) for unit in UNITS}
TEMPLATES.filters |= {"list_of": list_of, "program": recorded.program, "output": recorded.output}


def written(template: str, values: Mapping[str, Any]) -> str:
    """The template with values instead of placeholders.

    Raises:
        jinja2.UndefinedError: a placeholder names no value.
    """
    return TEMPLATES.from_string(template).render(values)
