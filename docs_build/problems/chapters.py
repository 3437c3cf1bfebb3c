"""The chapters of problems, as Markdown.

A chapter is a module and a text with the same name, such as ``memory.py`` and ``memory.md``. The text has an entry for
each problem::

    ## replica: Memory of a replica

    Given: { num_parameters = 7_000_000_000, num_ranks = 8, state = 8 }

    A model has {num_parameters|billion} parameters. How many bytes ...

    Hint: A hint, which is optional.

    Answer:

    Each rank stores **{cost.stored|GB}**.

The module has a function with the name of the entry. Its argument has the *givens*, which the statement, the hint and
the calculation all use, so they cannot disagree. It returns the figures of the answer. The answer can use the givens as
well; the statement cannot use the results. The name of the entry is a given of each problem.
"""

import importlib
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

from docs_build.problems.writing import Givens, Values, written
from docs_build.reading.text import counted, table

# The chapters in order: name and title.
CHAPTERS = {
    "memory": "Memory",
    "links": "Bytes on a link",
    "choosing": "Which strategy fits",
    "time": "How long a step is at least",
    "programs": "What goes wrong in this program",
}
_ENTRY = re.compile(
    r"^## (?P<name>\w+): (?P<title>[^\n]+)\n\n(?:Given: (?P<givens>[^\n]+)\n\n)?(?P<statement>.+?)\n\n"
    r"(?:Hint: (?P<hint>.+?)\n\n)?Answer:\n\n(?P<answer>.+?)\n(?=\n## |\Z)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Problem:
    """A problem.

    Attributes:
        name: of its function and of its anchor.
        title: its heading.
        statement, hint, answer: templates; the hint can be empty.
        givens: the figures of the statement.
        function: computes the figures of the answer.
    """

    name: str
    title: str
    statement: str
    hint: str
    answer: str
    givens: Values
    function: Callable[[Givens], Values]

    def solve(self, **others: Any) -> Values:
        """The figures of the answer, with other givens if there are any."""
        return self.function(Givens(**{**self.givens, **others}))

    def markdown(self, number: str) -> str:
        """The problem, with its hint and its answer folded."""
        givens = self.givens
        parts = [f"## {number} {self.title} {{ #{self.name} }}", written(self.statement, givens)]
        if self.hint:
            parts.append(_folded('??? tip "Hint"', written(self.hint, givens)))
        parts.append(_folded('??? success "Answer"', written(self.answer, {**givens, **self.solve()})))
        return "\n\n".join(parts)


@cache
def problems(chapter: str) -> list[Problem]:
    """The problems of a chapter, in order.

    Raises:
        AttributeError: an entry has no function.
    """
    solutions = importlib.import_module(f"docs_build.problems.{chapter}")
    text = (Path(__file__).parent / f"{chapter}.md").read_text(encoding="utf-8")
    found = []
    for one in _ENTRY.finditer(text):
        name, texts = one["name"], (one["statement"], one["hint"] or "", one["answer"])
        givens = tomllib.loads(f"given = {one['givens'] or '{}'}")["given"]
        givens = {key: _as_tuple(value) for key, value in givens.items()} | {"name": name}
        found.append(Problem(name, one["title"], *texts, givens, getattr(solutions, name)))
    return found


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


@cache
def chapter(name: str) -> str:
    """All problems of a chapter."""
    number = list(CHAPTERS).index(name) + 1
    made = (problem.markdown(f"{number}.{n}") for n, problem in enumerate(problems(name), start=1))
    return "\n\n".join(made)


def contents() -> str:
    """A table of the chapters, with the titles of their problems."""
    rows = []
    for number, (name, title) in enumerate(CHAPTERS.items(), start=1):
        titles = "; ".join(f"[{problem.title}]({name}.md#{problem.name})" for problem in problems(name))
        rows.append([number, f"[{title}]({name}.md)", counted(len(problems(name)), "problem"), titles])
    return table(["", "chapter", "", "problems"], rows)


def _folded(head: str, text: str) -> str:
    return f"{head}\n\n{indent(text, '    ')}"
