"""The exercises of the learning pages: questions and answers from ``exercises.md``.

The slides of the lectures show some of the questions, and a page for teachers has their answers.
"""

import re
from functools import cache
from pathlib import Path

from docs_build.pages.slides import slides_of
from docs_build.templates import MARKDOWN

ENTRY = re.compile(r"^## (\w+)\n\n(.+?)\n\nAnswer:\n\n(.+?)\n(?=\n## |\Z)", re.MULTILINE | re.DOTALL)


@cache
def texts() -> dict[str, tuple[str, str]]:
    """Question and answer by name, both Markdown."""
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return {name: (question, " ".join(answer.split())) for name, question, answer in ENTRY.findall(text)}


def answers_of(lecture: str) -> str:
    """The questions on the slides of a lecture, with their answers."""
    asked = [(slide, *texts()[slide.question]) for slide in slides_of(lecture) if slide.question]
    return str(MARKDOWN.answers(lecture, asked))
