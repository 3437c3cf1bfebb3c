"""The pages of the failure lab: its scripts, and the recorded output of both ranks.

The text about a script is on its page, ``docs/lab/NAME.md``, which starts with these lines::

    symptom: The loss does not fall.
    family: silent                        one of `FAMILIES`
    rows: CTOR-05                         requirement IDs
"""

from mkdocs.utils.meta import get_data

from docs_build.reading.order import ROOT
from docs_build.recording.failures import LAB, recorded
from docs_build.templates import MARKDOWN

PAGES = ROOT / "docs" / "lab"
FAMILIES = {"silent": "silent wrong answer", "hang": "hang", "loud": "loud"}
FIX = "# ---- one way to fix it; try your own first ----"
START = 'if __name__ == "__main__":'


def failures() -> list[dict[str, str]]:
    """Name and title of each script that has a page, with the first lines of the page; the silent ones first."""
    found = []
    for page in PAGES.glob("*.md"):
        text, head = get_data(page.read_text(encoding="utf-8"))
        if "family" in head:
            title = text.strip().splitlines()[0].removeprefix("# ")
            found.append({"name": page.stem, "title": title, **head})
    return sorted(found, key=lambda one: (list(FAMILIES).index(one["family"]), one["name"]))


def table() -> str:
    """A table of all scripts, in Markdown."""
    return str(MARKDOWN.failures(failures(), FAMILIES))


def what_happens(name: str) -> str:
    """The script without its fixed form, and the output of each rank, folded.

    Raises:
        KeyError: the script was never recorded.
    """
    return str(MARKDOWN.failure(_script(name).partition(FIX)[0], _command(name), recorded()[name]))


def fix(name: str) -> str:
    """The fixed form, and the output of each rank with it."""
    code = _script(name).partition(FIX)[2].partition(START)[0]
    return str(MARKDOWN.fixed(code, _command(name), recorded()[name]))


def _script(name: str) -> str:
    return (LAB / f"{name}.py").read_text(encoding="utf-8")


def _command(name: str) -> str:
    return f"torchrun --nproc-per-node 2 tutorials/failure_lab/{name}.py"
