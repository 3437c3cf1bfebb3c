"""The pages that show the code contain every line of it, and each line has exactly one address."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from docs_build.reading import source
from docs_build.reading.order import ROOT, all_modules, path_of, reading_order
from docs_build.reading.source import find_function, read_module


def test_the_reading_order_has_every_module_once() -> None:
    named = [name for _, _, names in reading_order() for name in names]
    assert sorted(named) == all_modules()


def test_reading_order_begins_with_both_apis() -> None:
    first = [name for _, _, names in reading_order()[:2] for name in names]
    assert first[:4] == ["engine/layout.py", "engine/bucket.py", "engine/per_param.py", "engine/unit.py"]
    assert first[-4:] == ["engine/flat.py", "fsdp1/wrapper.py", "checkpoint/state_dict.py", "checkpoint/optim_state.py"]


def test_the_navigation_names_fsdp2_and_fsdp1() -> None:
    titles = [title.replace("`", "") for title, _, _ in reading_order()]
    assert titles[:2] == ["FSDP2: fully_shard", "FSDP1: FullyShardedDataParallel"]
    assert {"Behind FSDP2", "Behind FSDP1"} <= set(titles)
    assert [title for title in titles if "api" in title] == []


def test_the_design_and_the_readme_give_the_same_reading_order() -> None:
    first = [name for _, _, names in reading_order()[:2] for name in names]
    design = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8").partition("## Reading order")[2]
    order = design.partition("FSDP2 comes first")[0]
    said = [name.rpartition("/")[2] for name in re.findall(r"[\w/]+(?= ->|`)", order)]
    assert said == [Path(name).stem for name in first]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("To read the source without the site")[2]
    linked = re.findall(r"\(minifsdp/([\w/]+\.py)\)", readme)
    assert linked == first[: len(linked)]
    assert len(linked) >= 10
    page = " ".join((ROOT / "docs" / "read" / "index.md").read_text(encoding="utf-8").split())
    assert [len(names) for _, _, names in reading_order()[:2]] == [11, 4]
    assert "The first eleven are the main path of FSDP2, and the next four add FSDP1." in page


@pytest.mark.parametrize("name", all_modules())
def test_every_code_line_is_in_exactly_one_row(name: str) -> None:
    text = path_of(name).read_text(encoding="utf-8")
    shown = [line for row in read_module(name).rows for line in row.lines]
    assert len(shown) == len(set(shown))
    strings = _docstring_lines(ast.parse(text))
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#") and number not in strings:
            assert number in shown, f"{name}:{number} {line}"


@pytest.mark.parametrize("name", all_modules())
def test_every_comment_is_shown_either_as_prose_or_in_the_code(name: str) -> None:
    module = read_module(name)
    lines = module.text.splitlines()
    shown = {line for row in module.rows for line in row.lines}
    left = "\n".join(row.comment for row in module.rows)
    banners = {row.name for row in module.rows if row.kind == "banner"}
    for number, line in enumerate(lines, 1):
        words = line.strip().removeprefix("#").strip()
        if line.lstrip().startswith("#") and number not in shown:
            assert words in left or any(name in words for name in banners), f"{number} {line}"


@pytest.mark.parametrize("name", all_modules())
def test_addresses_are_unique_on_a_page(name: str) -> None:
    anchors = [row.anchor for row in read_module(name).rows]
    assert len(anchors) == len(set(anchors))


def _docstring_lines(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


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


def test_missing_function_raises_key_error() -> None:
    first, last, docstring = find_function("engine/unit.py", "Unit.wait")
    assert first < docstring[0] <= docstring[-1] < last
    with pytest.raises(KeyError, match=r"engine/unit\.py has no Unit\.hurry"):
        find_function("engine/unit.py", "Unit.hurry")
