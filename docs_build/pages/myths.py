"""The page of myths: each wrong claim, the correct statement, and the tests that demonstrate it."""

from docs_build.pages.badges import badges
from docs_build.reading.text import words_of
from docs_build.recording.results import all_rows
from docs_build.templates import PAGES


def page() -> str:
    """All requirements with an ID that begins with ``MYTH``, as HTML."""
    rows = [row for row in all_rows().values() if row.id.startswith("MYTH")]
    return PAGES.myths([(row, badges(row), [words_of(test) for test in row.tests]) for row in rows])
