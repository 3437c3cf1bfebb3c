"""The pages that show the code: all lines, notes, folded recording code, and the tests that fail without a line."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path

import pytest

from docs_build.reading import source
from docs_build.reading.breaks import RECORD, breaks_of, first_changed_line
from docs_build.reading.notebook import NOTES, notes_of, place_notes
from docs_build.reading.order import ROOT, all_modules, reading_order
from docs_build.reading.tracing import recording_lines
from spec_tools.breaks.edits import BREAKS

CORE = [
    f"engine/{name}.py" for name in ("unit", "hooks", "schedule", "flat", "bucket", "comm_streams", "reduce", "root")
]


def test_the_reading_order_has_every_module_once_and_is_that_of_the_texts() -> None:
    assert sorted(name for _, _, names in reading_order() for name in names) == all_modules()
    assert [len(names) for _, _, names in reading_order()[:2]] == [11, 4]
    first = [name for _, _, names in reading_order()[:2] for name in names]
    design = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8").partition("## Reading order")[2]
    said = re.findall(r"[\w/]+(?= ->|`)", design.partition("FSDP2 comes first")[0])
    assert [name.rpartition("/")[2] for name in said] == [Path(name).stem for name in first]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("To read the source without the site")[2]
    linked = re.findall(r"\(minifsdp/([\w/]+\.py)\)", readme)
    assert linked == first[: len(linked)]
    assert len(linked) >= 10
    page = " ".join((ROOT / "docs" / "read" / "index.md").read_text(encoding="utf-8").split())
    assert "The first eleven are the main path of FSDP2, and the next four add FSDP1." in page


def docstring_lines(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


@pytest.mark.parametrize("name", all_modules())
def test_every_line_is_shown_once_with_its_comments_and_its_notes(name: str) -> None:
    module = source.read_module(name)
    shown = [line for row in module.rows for line in row.lines]
    anchors = [row.anchor for row in module.rows]
    assert len(shown) == len(set(shown))
    assert len(anchors) == len(set(anchors))
    left = "\n".join(row.comment for row in module.rows) + "".join(
        row.name for row in module.rows if row.kind == "banner"
    )
    strings = docstring_lines(ast.parse(module.text))
    for number, line in enumerate(module.text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            words = line.strip().strip("#- ")
            assert number in shown or words in left, f"{name}:{number} {line}"
        elif line.strip() and number not in strings:
            assert number in shown, f"{name}:{number} {line}"
    assert sorted(row.note for row in module.rows if row.note) == sorted(words for _, _, words in notes_of(name))


def test_comments_above_statements_begin_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '''
    """An essay."""

    def f(x):
        """Doubles."""
        # Why one.
        y = x
        return [
            # inside of an expression
            y,
        ]  # behind code
    '''
    (tmp_path / "m.py").write_text(textwrap.dedent(text).lstrip())
    monkeypatch.setattr(source, "path_of", lambda name: tmp_path / name)
    rows = source.read_module.__wrapped__("m.py").rows
    assert [(row.anchor, row.docstring, row.comment, row.lines) for row in rows] == [
        ("f", "Doubles.", "", [3]),
        ("f-1", "", "Why one.", [6, 7, 8, 9, 10]),
    ]


# --- notes ---


def test_core_modules_have_notes() -> None:
    written = {path.relative_to(NOTES).with_suffix(".py").as_posix() for path in NOTES.rglob("*.md")}
    assert set(CORE) <= written <= set(all_modules())


def test_note_for_missing_or_ambiguous_statement_raises_error() -> None:
    text = "class C:\n    def f(self):\n        x = 1\n        y = 2\n        y = 2\n"
    tree = ast.parse(text)
    assert place_notes(text, tree, [("C.f", "x = 1", "One.")]) == {3: "One."}
    for function, statement, number in (("C.f", "z = 3", 0), ("C.g", "x = 1", 0), ("C.f", "y = 2", 2)):
        with pytest.raises(KeyError, match=f"{number} statements of {function}"):
            place_notes(text, tree, [(function, statement, "Gone.")])


def test_note_does_not_change_anchors_of_other_rows() -> None:
    anchors = {row.anchor: row for row in source.read_module("engine/unit.py").rows}
    assert anchors["Unit.unshard-1"].comment.startswith("A unit in the user's")
    assert anchors["Unit.unshard-n1"].note.startswith("The rate limiter.")


# --- recording code ---


def test_recording_code_is_recognized_by_syntax() -> None:
    text = textwrap.dedent("""
        if events.recorder is not None:
            events.recorder.end("F", self.name)
        if events.recorder is None:
            self.work()
        if events.recorder is not None:
            self.event = events.recorder.begin("B", self.name)
        else:
            self.play()
        events.last_event = self.event()
        self.free()
    """)
    assert recording_lines(ast.parse(text)) == {2, 3, 10}


def test_recorder_calls_are_hidden_in_the_core() -> None:
    for name in CORE:
        module = source.read_module(name)
        lines = enumerate(module.text.splitlines(), 1)
        assert [line for n, line in lines if "events.recorder" in line and n not in module.recording] == [], name


# --- tests that fail ---


@pytest.mark.needs("mkdocs")
def test_requirements_recorded_for_a_line_are_linked_there() -> None:
    from docs_build.pages.modulepage import module_page

    pages = {name: module_page(name) for name in all_modules() if breaks_of(name)}
    for known_as, entry in json.loads(RECORD.read_text(encoding="utf-8"))["mutants"].items():
        name, line = first_changed_line(BREAKS[known_as])
        row = next(row for row in source.read_module(name).rows if line in row.lines)
        if entry["red"]:
            section = pages[name].partition(f'id="{row.anchor}"')[2].partition("<section ")[0]
            assert set(entry["red"]) <= set(re.findall(r"spec\.html#([\w-]+)", section)), known_as


def test_limiter_mutant_is_shown_at_limiter_call() -> None:
    lines = source.read_module("engine/unit.py").text.splitlines()
    found = {lines[line - 1].strip(): ones for line, ones in breaks_of("engine/unit.py").items()}
    assert list(found["self.root.limiter.throttle(self.name)"][0].red) == ["LIM-02"]


@pytest.mark.parametrize("name", CORE)
@pytest.mark.needs("mkdocs")
def test_page_of_a_core_module_links_to_learn_page_and_tests(name: str) -> None:
    from docs_build.pages.asides import of_module

    above = " ".join(of_module(source.read_module(name), f"read/{name.removesuffix('.py')}.html"))
    assert "../../learn/" in above
    assert "<code>spec_tests/" in above
