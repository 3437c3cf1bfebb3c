"""The pages that show the code: all lines, notes, folded recording code, and the tests that fail without a line."""

from __future__ import annotations

import ast
import json
import re

import pytest

from docs_build.reading import source
from docs_build.reading.breaks import RECORD, breaks_of, first_changed_line
from docs_build.reading.definitions import docstring_lines
from docs_build.reading.notebook import notes_of, place_notes
from docs_build.reading.order import all_modules
from spec_tools.breaks.edits import BREAKS

UNIT = source.read_module("engine/unit.py")


@pytest.mark.parametrize("name", all_modules())
def test_every_line_is_shown_once_with_its_comments_and_its_notes(name: str) -> None:
    module = source.read_module(name)
    shown = [line for row in module.rows for line in row.lines]
    anchors = [row.anchor for row in module.rows]
    assert len(shown) == len(set(shown))
    assert len(anchors) == len(set(anchors))
    beside = "\n".join(row.name if row.kind == "banner" else row.comment for row in module.rows)
    strings = {line for node in ast.walk(ast.parse(module.text)) for line in docstring_lines(node)}
    for number, line in enumerate(module.text.splitlines(), 1):
        is_beside = line.lstrip().startswith("#") and line.strip().strip("#- ") in beside
        assert number in shown or number in strings or is_beside or not line.strip(), f"{name}:{number} {line}"
    assert sorted(row.note for row in module.rows if row.note) == sorted(words for _, _, words in notes_of(name))


def test_note_for_missing_or_ambiguous_statement_raises_error() -> None:
    text = "class C:\n    def f(self):\n        x = 1\n        y = 2\n        y = 2\n"
    tree = ast.parse(text)
    assert place_notes(text, tree, [("C.f", "x = 1", "One.")]) == {3: "One."}
    for function, statement, number in (("C.f", "z = 3", 0), ("C.g", "x = 1", 0), ("C.f", "y = 2", 2)):
        with pytest.raises(KeyError, match=f"{number} statements of {function}"):
            place_notes(text, tree, [(function, statement, "Gone.")])


def test_exactly_the_recorder_calls_are_folded() -> None:
    lines = {line.strip(): n for n, line in enumerate(UNIT.text.splitlines(), 1)}
    assert lines["events.recorder.all_gather_begins(self)"] in UNIT.recording
    assert lines["self._handle = self.layout.all_gather(self.root.comm_streams)"] not in UNIT.recording
    assert [line for line, n in lines.items() if "events.recorder" in line and n not in UNIT.recording] == []


@pytest.mark.needs("mkdocs")
def test_requirements_recorded_for_a_line_are_linked_there() -> None:
    from docs_build.pages.modulepage import module_page

    pages = {name: module_page(name) for name in all_modules() if breaks_of(name)}
    for known_as, entry in json.loads(RECORD.read_text(encoding="utf-8"))["mutants"].items():
        name, line = first_changed_line(BREAKS[known_as])
        if name.startswith("spec_tools/"):
            continue  # The tools beside the package have no pages.
        row = next(row for row in source.read_module(name).rows if line in row.lines)
        if entry["red"]:
            section = pages[name].partition(f'id="{row.anchor}"')[2].partition("<section ")[0]
            assert set(entry["red"]) <= set(re.findall(r"spec\.html#([\w-]+)", section)), known_as
