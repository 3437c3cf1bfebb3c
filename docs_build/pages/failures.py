"""The pages of the failure lab: its scripts, and the recorded output of both ranks.

The text about a script is on its page, ``docs/lab/NAME.md``, which starts with these lines::

    symptom: The loss does not fall.
    family: silent                        one of `FAMILIES`
    rows: CTOR-05                         requirement IDs
"""

from functools import cache
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from mkdocs.utils.meta import get_data

from docs_build.reading.order import ROOT
from docs_build.reading.text import fitting
from docs_build.reading.text import table as markdown
from docs_build.recording.failures import LAB, recorded

PAGES = ROOT / "docs" / "lab"
FAMILIES = {"silent": "silent wrong answer", "hang": "hang", "loud": "loud"}
FIX = "# ---- one way to fix it; try your own first ----"
START = 'if __name__ == "__main__":'


class Failure(NamedTuple):
    """One script.

    Attributes:
        name: of the script, without ``.py``.
        title: of its page.
        symptom: what a user observes.
        family: one of `FAMILIES`.
        rows: IDs of the requirements that define the behaviour.
    """

    name: str
    title: str
    symptom: str
    family: str
    rows: tuple[str, ...]


@cache
def failures() -> list[Failure]:
    """All scripts that have a page, the silent ones first."""
    found = [_read(path) for path in PAGES.glob("*.md") if path.stem != "index"]
    return sorted(found, key=lambda one: (list(FAMILIES).index(one.family), one.name))


def _read(page: Path) -> Failure:
    text, head = get_data(page.read_text(encoding="utf-8"))
    title = text.strip().splitlines()[0].removeprefix("# ")
    return Failure(page.stem, title, head["symptom"], head["family"], tuple(head["rows"].split()))


def table() -> str:
    """A table of all scripts, in Markdown."""
    rows = [
        (f"[`{one.name}.py`]({one.name}.md)", one.symptom, FAMILIES[one.family], ", ".join(one.rows))
        for one in failures()
    ]
    return markdown(["script", "symptom", "family", "rows"], rows)


def what_happens(name: str) -> str:
    """The script without its fixed form, and the output of each rank, folded.

    Raises:
        KeyError: the script was never recorded.
    """
    run = recorded()[name]
    said = [indent(_fence("text", fitting(words)), "    ") for words in run["broken"]]
    parts = [
        _fence("python", _script(name).partition(FIX)[0]),
        "Guess the output before you unfold it. To run the script:",
        _fence("", _command(name)),
        *(f'??? failure "What rank {rank} says"\n\n{words}' for rank, words in enumerate(said)),
        f"<small>Recorded {run['date']}; {run['machine']}</small>",
    ]
    return "\n\n".join(parts) + "\n"


def fix(name: str) -> str:
    """The fixed form, and the output of each rank with it."""
    code = _script(name).partition(FIX)[2].partition(START)[0].strip()
    words = "\n".join([f"$ {_command(name)} --fixed\n", *recorded()[name]["fixed"]])
    return f"{_fence('python', code)}\n\n{_fence('text', words)}\n"


def _script(name: str) -> str:
    return (LAB / f"{name}.py").read_text(encoding="utf-8")


def _command(name: str) -> str:
    return f"torchrun --nproc-per-node 2 tutorials/failure_lab/{name}.py"


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
