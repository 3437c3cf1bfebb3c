"""The section "Break it" of the learning pages: a test fails after the change of each line."""

from __future__ import annotations

import re

import pytest

from docs_build.reading.order import ROOT
from spec_tools.breaks import runner
from spec_tools.breaks.edits import Break

PAGE = (ROOT / "docs" / "learn" / "index.md").read_text(encoding="utf-8").partition("## Break it")[2]
# Module, line, replacement, test file and test: the worked example, which the page explains in words, and its table.
EXAMPLE = (
    "engine/hooks.py",
    "if unit.policy.reshard_after_forward and not unit.is_held:",
    "if False:",
    "spec_tests/sharding/test_strategies.py",
    "test_full_shard_all_gathers_twice_and_reduces_once",
)
ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \| `(.+)` \| `(.+)`, `(.+)` \|$", PAGE, re.MULTILINE)


def test_page_has_a_worked_example_and_three_lines_that_exist_once() -> None:
    assert all(words in PAGE for words in EXAMPLE)
    assert len(ROWS) == 3
    for module, line, *_ in [EXAMPLE, *ROWS]:
        assert (ROOT / "minifsdp" / module).read_text(encoding="utf-8").count(line) == 1


@pytest.mark.docs
@pytest.mark.parametrize(("module", "line", "instead", "file", "test"), [EXAMPLE, *ROWS])
def test_named_test_fails_after_the_change_of_the_line(
    module: str, line: str, instead: str, file: str, test: str
) -> None:
    with runner.broken(Break("change", "", f"minifsdp/{module}", line, instead)) as folder:
        failed, end = runner.failed_tests(folder, [f"{file}::{test}"])
    assert failed
    assert end == ""
