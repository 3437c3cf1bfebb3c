"""The pages that show the code: notes, recording code, line numbers, and the tests that fail if a line is broken."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path

import pytest

from docs_build.reading.breaks import RECORD, breaks_of, first_changed_line
from docs_build.reading.mentions import pages_on_function, pages_on_module
from docs_build.reading.notebook import NOTES, notes_of, place_notes
from docs_build.reading.order import ROOT, all_modules, path_of
from docs_build.reading.source import read_module
from docs_build.reading.tracing import recording_lines
from spec_tools.breaks.edits import BREAKS

CORE = [
    f"engine/{name}.py" for name in ("unit", "hooks", "schedule", "flat", "bucket", "comm_streams", "reduce", "root")
]

# --- notes ---


@pytest.mark.parametrize("name", all_modules())
def test_every_note_finds_its_line(name: str) -> None:
    notes = notes_of(name)
    text = path_of(name).read_text(encoding="utf-8")
    placed = place_notes(text, ast.parse(text), notes)
    assert sorted(placed.values()) == sorted(words for _, _, words in notes)
    shown = {row.lines[0]: row.note for row in read_module(name).rows if row.note}
    assert shown == placed
    assert all(placed.values())


def test_every_file_of_notes_belongs_to_a_module_and_has_some() -> None:
    written = {path.relative_to(NOTES).with_suffix(".py").as_posix() for path in NOTES.rglob("*.md")}
    assert set(CORE) <= written <= set(all_modules())
    assert [name for name in written if len(notes_of(name)) < 3] == []


def body_without_words(name: str) -> list[tuple[int, str]]:
    """For each row of a function, the number of statements in its body that are not folded, and its anchor."""
    module = read_module(name)
    nodes = list(ast.walk(ast.parse(module.text)))
    begins = {node.lineno for node in nodes if isinstance(node, ast.stmt)}
    heads = {
        line for node in nodes if isinstance(node, ast.FunctionDef) for line in range(node.lineno, node.body[0].lineno)
    }
    rows = [row for row in module.rows if row.kind in ("function", "method", "step")]
    silent = module.recording | heads
    return [(sum(1 for n in row.lines if n in begins and n not in silent), row.anchor) for row in rows]


@pytest.mark.parametrize("name", CORE)
def test_core_methods_have_frequent_comments(name: str) -> None:
    assert [row for row in body_without_words(name) if row[0] > 9] == []


SNIPPET = """
class C:
    def f(self):
        x = 1
        # Why.
        y = 2
        if x:
            y = 2
        return y
"""


def test_note_for_missing_or_ambiguous_statement_raises_error() -> None:
    tree = ast.parse(SNIPPET)
    assert place_notes(SNIPPET, tree, [("C.f", "x = 1", "One.")]) == {4: "One."}
    for function, statement, number in (("C.f", "z = 3", 0), ("C.g", "x = 1", 0), ("C.f", "y = 2", 2)):
        with pytest.raises(KeyError, match=f"{number} statements of {function}"):
            place_notes(SNIPPET, tree, [(function, statement, "Gone.")])
    with pytest.raises(KeyError):
        place_notes(SNIPPET, tree, [("C.f", "x = 1", "One."), ("C.f", "x = 1", "Another.")])


def test_a_note_is_read_with_its_function_and_its_statement(tmp_path: Path) -> None:
    text = "## C.f\n\n    x = 1\n\nOne,\nor two.\n\n    if x:\n\nElse.\n\n## g\n\n    pass\n\nNothing.\n"
    (tmp_path / "m.md").write_text(text)
    reported = [("C.f", "x = 1", "One,\nor two."), ("C.f", "if x:", "Else."), ("g", "pass", "Nothing.")]
    assert notes_of("m.py", tmp_path) == reported
    assert notes_of("n.py", tmp_path) == []


def test_note_does_not_change_anchors_of_other_rows() -> None:
    anchors = {row.anchor: row for row in read_module("engine/unit.py").rows}
    assert anchors["Unit.unshard-1"].comment.startswith("A unit in the user's")
    assert anchors["Unit.unshard-n1"].note.startswith("The rate limiter.")
    # A recording that is older than the note refers to the row's earlier anchor.
    assert read_module("engine/unit.py").anchor_of(anchors["Unit.unshard-n1"].lines[0]) == "Unit.unshard-1"


# --- recording code ---


def test_recording_code_is_recognized_by_syntax() -> None:
    text = textwrap.dedent("""
        class C:
            def f(self):
                if events.recorder is not None:
                    events.recorder.end("F", self.name)
                if events.recorder is None:
                    self.work()
                if events.recorder is not None:
                    self.event = events.recorder.begin("B", self.name)
                else:
                    self.play()
                events.last_event = self.event()
                return self.free()
    """)
    lines = text.splitlines()
    kept = [lines[n - 1].strip() for n in range(1, len(lines) + 1) if n not in recording_lines(ast.parse(text))]
    assert list(filter(None, kept)) == [
        "class C:",
        "def f(self):",
        "if events.recorder is None:",
        "self.work()",
        "if events.recorder is not None:",
        'self.event = events.recorder.begin("B", self.name)',
        "else:",
        "self.play()",
        "return self.free()",
    ]


def records(name: str) -> bool:
    return bool(recording_lines(ast.parse(path_of(name).read_text(encoding="utf-8"))))


# Selected by the code alone: if a line is broken on purpose, its note may not match, but other tests must still run.
@pytest.mark.parametrize("name", [*filter(records, all_modules())])
def test_visible_code_needs_no_recording_code(name: str) -> None:
    """No visible line reads a name or attribute that is only set in recording code."""
    module = read_module(name)
    for function in ast.walk(ast.parse(module.text)):
        if isinstance(function, ast.FunctionDef) and function.lineno not in module.recording:
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            stays = {node.id for node in names if node.lineno not in module.recording}
            kept = {
                node.id for node in names if isinstance(node.ctx, ast.Store) and node.lineno not in module.recording
            }
            assert stays & (stored - kept) == set(), function.name


def test_recorder_calls_are_hidden_in_the_core() -> None:
    for name in CORE:
        module = read_module(name)
        lines = enumerate(module.text.splitlines(), 1)
        seen = [line for n, line in lines if "events.recorder" in line and n not in module.recording]
        assert seen == [], name


# --- line numbers ---


@pytest.mark.needs("mkdocs")
def test_each_code_line_has_a_number_and_recording_lines_are_folded() -> None:
    from docs_build.pages.modulepage import code_block

    html = code_block([3, 4, 7], ["", "", "a", "b", "", "", "c"], {4})
    assert re.findall(r'<a id="L(\d+)" href="#L\1" data-n="\1"></a>(\w)', html) == [("3", "a"), ("4", "b"), ("7", "c")]
    before, fold, after = re.split(r"<details class=\"sbs-fold\">|</details>", html)
    assert "<summary>line 4 only records</summary>" in fold
    assert 'id="L4"' in fold
    assert 'id="L3"' in before
    assert 'id="L7"' in after


# --- tests that fail, and Learn ---


def test_mutant_changes_line_of_its_function() -> None:
    for one in BREAKS.values():
        name, line = first_changed_line(one)
        assert any(line in row.lines for row in read_module(name).rows), one.name


def test_limiter_mutant_is_shown_at_limiter_call() -> None:
    lines = read_module("engine/unit.py").text.splitlines()
    found = {lines[line - 1].strip(): ones for line, ones in breaks_of("engine/unit.py").items()}
    assert list(found["self.root.limiter.throttle(self.name)"][0].red) == ["LIM-02"]


def links_to_rows(html: str) -> dict[str, set[str]]:
    """For each row of a page, the requirements that are listed below its prose."""
    found: dict[str, set[str]] = {}
    for section in html.split("<section ")[1:]:
        anchor = section.partition('id="')[2].partition('"')[0]
        _, has, red = section.partition('class="sbs-red"')
        found[anchor] = set(re.findall(r"spec\.html#([\w-]+)", red.partition("</p>")[0])) if has else set()
    return found


@pytest.mark.needs("mkdocs")
def test_requirements_recorded_for_function_are_linked_there() -> None:
    from docs_build.pages import modulepage as pages

    linked = {name: links_to_rows(pages.module_page(name)) for name in all_modules() if breaks_of(name)}
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["mutants"]
    for known_as, entry in recorded.items():
        name, line = first_changed_line(BREAKS[known_as])
        row = next(row for row in read_module(name).rows if line in row.lines)
        assert set(entry["red"]) <= linked[name][row.anchor], known_as
    assert sum(len(rows) for page in linked.values() for rows in page.values()) > 180


def test_function_links_to_its_learn_page() -> None:
    assert pages_on_function("engine/unit.py", "Unit.wait") == [("learn/unit.html", "Units and their states")]
    assert pages_on_function("engine/unit.py", "Unit.update_policy") == []
    assert ("learn/schedule.html", "Prefetching") in pages_on_module("engine/schedule.py")


@pytest.mark.parametrize("name", CORE)
@pytest.mark.needs("mkdocs")
def test_page_of_a_core_module_links_to_learn_page_and_tests(name: str) -> None:
    from docs_build.pages.asides import of_module

    above = " ".join(of_module(read_module(name), f"read/{name.removesuffix('.py')}.html"))
    assert "../../learn/" in above
    same = ROOT / "spec_tests" / Path(name).parent / f"test_{Path(name).name}"
    assert (f"spec_tests/{Path(name).parent}/{same.name}" if same.exists() else "<code>spec_tests/") in above
