"""Small pieces of text that many pages have."""

from collections.abc import Iterable
from textwrap import fill


def table(heads: Iterable[str], rows: Iterable[Iterable[object]], align: str = "l") -> str:
    """A Markdown table; ``align`` has ``l`` or ``r`` for each column, and its last letter applies to all others."""
    heads = list(heads)
    marks = [{"l": "---", "r": "--:"}[align[min(column, len(align) - 1)]] for column in range(len(heads))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (heads, marks, *rows))


def counted(number: int, word: str) -> str:
    """``1 test``, ``2 tests``."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def words_of(test: str) -> tuple[str, str]:
    """The file of a test, and its name as words, without its variant."""
    file, _, name = test.partition("::")
    return file, name.partition("[")[0].removeprefix("test_").replace("_", " ")


def fitting(text: str) -> str:
    """A text whose lines are at most as wide as a page."""
    return "\n".join(fill(line, 100, subsequent_indent="    ", break_on_hyphens=False) for line in text.splitlines())
