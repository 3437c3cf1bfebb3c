"""The exercises of the learning pages: questions and answers from ``exercises.md``, with computed values."""

import re
from functools import cache
from pathlib import Path

from docs_build.pages import answers

ENTRY = re.compile(r"^## (\w+)\n\n(.+?)\n\nAnswer:\n\n(.+?)\n(?=\n## |\Z)", re.MULTILINE | re.DOTALL)


@cache
def texts() -> dict[str, tuple[str, str]]:
    """Question and answer by name."""
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return {name: (question, answer) for name, question, answer in ENTRY.findall(text)}


def exercise(name: str) -> tuple[str, str]:
    """Question and answer, both Markdown.

    Raises:
        KeyError: there is no exercise with that name, or a value of its answer is missing.
    """
    question, answer = texts()[name]
    return question, " ".join(answer.format_map(getattr(answers, name)()).split())
