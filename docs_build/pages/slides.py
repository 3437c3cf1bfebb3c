"""The pages of lectures: each headline of the second level begins a slide.

The source of a lecture is Markdown, ``docs/teach/lecture-1.md``. Worked example, the second slide of a lecture::

    ## The idea                                   <section class="slide">
                                                  <h2 id="slide-2">The idea</h2>
    Each rank stores a shard.                     <p>Each rank stores a shard.</p>
                                                  <aside class="notes">
    <aside class="notes" markdown="block">        <p>Ask what is missing.</p>
    Ask what is missing.                          </aside>
    </aside>                                      </section>

Without a script, the page is a document with all slides. ``docs/assets/js/slides.js`` shows one slide at a time.
"""

import re
from dataclasses import dataclass
from functools import cache
from itertools import count

from docs_build.reading.order import ROOT

LECTURES = ("lecture-1", "lecture-2")
_HEAD = re.compile(r"^## (.+)$", re.MULTILINE)
_NOTES = re.compile(r'^<aside class="notes" markdown="block">\n(.+?)\n</aside>$', re.MULTILINE | re.DOTALL)
_QUESTION = re.compile(r"^\{\{ question (\w+) \}\}$", re.MULTILINE)


@dataclass(frozen=True)
class Slide:
    """One slide of a lecture, as in its source.

    Attributes:
        number: its number, from 1.
        title: its headline.
        text: the Markdown below the headline, without the notes.
        notes: the Markdown of the speaker notes.
        question: the name of the question on the slide, or ``None``.
    """

    number: int
    title: str
    text: str
    notes: str
    question: str | None


@cache
def slides_of(lecture: str) -> tuple[Slide, ...]:
    """The slides of a lecture, in order."""
    text = (ROOT / "docs" / "teach" / f"{lecture}.md").read_text(encoding="utf-8")
    _, *parts = _HEAD.split(text)
    found = []
    for number, (title, body) in enumerate(zip(parts[::2], parts[1::2], strict=True), 1):
        notes, question = _NOTES.search(body), _QUESTION.search(body)
        shown = _NOTES.sub("", body).strip()
        found.append(Slide(number, title, shown, notes[1] if notes else "", question[1] if question else None))
    return tuple(found)


def numbered(markdown: str) -> str:
    """A lecture whose headlines have the anchors ``slide-1``, ``slide-2`` and so on."""
    numbers = count(1)
    return _HEAD.sub(lambda found: f"## {found[1]} {{ #slide-{next(numbers)} }}", markdown)


def sections(html: str, assets: str) -> str:
    """The HTML of a lecture with a ``section`` around each slide, and with its style sheet.

    Args:
        html: the page, with numbered headlines.
        assets: the address of the folder ``assets``.
    """
    head, *parts = re.split(r'(?=<h2 id="slide-)', html)
    shown = "".join(f'<section class="slide">\n{part.rstrip()}\n</section>\n' for part in parts)
    return f'<link rel="stylesheet" href="{assets}/css/slides.css">\n{head}<div class="slides">\n{shown}</div>\n'
