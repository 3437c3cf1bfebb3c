"""Edits of the syntax tree: what a pattern matches, what its replacement is, and errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from spec_tests.harness.edit import Edit, always, never, remove, replace

SOURCE = '''
import torch

class Reducer:
    def finish(self, last, group=None):
        """Ends the reductions."""
        if last is not None and self.is_open:  # a comment
            self.stream.wait_event(last.event)
            self.complete(last, kind="RS", group=group)
        return [part
                for part in self.parts if part.is_whole]

def mean(whole, size):
    return whole.div_(size) if size > 1 else whole
'''


def edited(tmp_path: Path, edit: Edit, source: str = SOURCE) -> str:
    """The module after the edit, with each statement on one line."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text(source)
    result = edit.apply(package)
    assert result.path == package / "module.py"
    return ast.unparse(ast.parse(result.text))


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (remove("Reducer.finish", "self.stream.wait_event($event)"), "            pass"),
        (remove("Reducer", "self.complete(...)"), "            pass"),
        (never("Reducer.finish", "$last is not None and self.is_open"), "        if False:"),
        (always("Reducer.finish", "$part.is_whole"), "        return [part for part in self.parts if True]"),
        (replace("mean", "$a if $c else $b", "$b"), "    return whole"),
        (
            replace("mean", "$whole.div_($size)", "$size.mul($whole)"),
            "    return size.mul(whole) if size > 1 else whole",
        ),
        (
            replace("Reducer.finish", "self.complete(..., group=$g)", "self.begin(..., group=[$g])"),
            "            self.begin(last, group=[group], kind='RS')",
        ),
        (replace("Reducer.finish", "if $open:\n    ...", "...\nself.close()"), "        self.close()"),
        (
            replace("Reducer.finish", "if $open:\n    $wait(...)\n    ...", "..."),
            "        self.complete(last, kind='RS', group=group)",
        ),
    ],
)
def test_edit_replaces_what_its_pattern_matches(tmp_path: Path, edit: Edit, line: str) -> None:
    assert line in edited(tmp_path, edit).splitlines()


def test_other_names_format_and_comments_do_not_matter(tmp_path: Path) -> None:
    source = SOURCE.replace("last", "newest").replace("self.stream.wait_event(", "self.stream.wait_event(  # now\n")
    assert "newest.event" not in edited(tmp_path, remove("Reducer.finish", "self.stream.wait_event($last)"), source)


def test_edit_returns_the_first_changed_line_of_the_original(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    wait = "self.stream.wait_event($event)"
    assert remove("Reducer.finish", wait).apply(tmp_path).line == 8
    assert remove("Reducer.finish", f"if $open:\n    {wait}\n    ...").apply(tmp_path).line == 7
    whole = f"if $open:\n    {wait}\n    ..."
    assert replace("Reducer.finish", whole, whole.replace(wait, "pass")).apply(tmp_path).line == 8


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (remove("Reducer.begin", "self.close()"), "nothing in the package is called 'Reducer.begin'"),
        (
            remove("Reducer.finish", "self.close()"),
            "matches 0 places in Reducer.finish, not 1: self.close()",
        ),
        (replace("mean", "$name", "1"), "the pattern matches 9 places in mean, not 1"),
        (replace("mean", "whole", "1"), "the pattern matches 2 places in mean, not 1"),
        (replace("mean", "$a.div_(size)", "$b"), r"the pattern has no \$b"),
        (replace("mean", "whole.div_($size)", "other"), "no such name for the edit of mean: other"),
    ],
)
def test_edit_that_does_not_apply_raises_an_error(tmp_path: Path, edit: Edit, error: str) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    with pytest.raises(ValueError, match=error):
        edit.apply(tmp_path)


def test_edit_of_several_places_states_their_number(tmp_path: Path) -> None:
    assert "return 1.div_" not in edited(tmp_path, replace("mean", "whole", "torch.whole", times=2))
