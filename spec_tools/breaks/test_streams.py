"""Checks that no program notices the intact engine, and that its program notices each broken engine."""

from __future__ import annotations

import ast
import difflib
import pathlib
import re
import tomllib
from collections.abc import Iterator

import pytest

from spec_tests.harness.accounting import ROOT
from spec_tests.streams.programs import PROGRAMS
from spec_tools.breaks.edits import BREAKS, edited
from spec_tools.breaks.runner import intact, run

STREAM_BREAKS = {name: one for name, one in BREAKS.items() if one.program}
# Lines that order something on streams.
ORDERS = re.compile(
    r"\.(wait|wait_event|wait_stream|wait_compute|record_stream|record_event|synchronize|handle)\(|\.join\(\)"
    "|non_blocking="
)
# Lines without a break, and the reasons.
LEFT_OUT = tomllib.loads(pathlib.Path(__file__).with_name("left_out.toml").read_text())


@pytest.mark.accelerator
@pytest.mark.simulated
@pytest.mark.spec("SIM-07")
@pytest.mark.parametrize("program", PROGRAMS)
def test_unchanged_engine_gives_no_error_and_no_race(program: str) -> None:
    outcome = intact(program)
    assert outcome.error is None
    assert outcome.races == []
    assert outcome.different == []


@pytest.mark.accelerator
@pytest.mark.simulated
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.spec("SIM-07", *one.rows)) for name, one in STREAM_BREAKS.items()]
)
def test_each_broken_engine_is_found(name: str) -> None:
    one = STREAM_BREAKS[name]
    red = run(one).red
    assert one.by in red, f"{one.what} {one.program} should notice by {one.by}, and notices: {red or 'nothing'}"


def test_each_stream_ordering_line_is_changed_by_one_of_at_least_sixty_breaks() -> None:
    package = ROOT / "minifsdp"
    every_edit = [edited(one) for one in STREAM_BREAKS.values()]
    unbroken = []
    for path in package.rglob("*.py"):
        lines = ast.unparse(ast.parse(path.read_text())).splitlines()
        after = [edit.after for edit in every_edit if edit.path == path]
        broken = {number for text in after for number in changed_lines(lines, text)}
        ordering = [line.strip() for number, line in enumerate(lines) if ORDERS.search(line) and number not in broken]
        unbroken += [f"{path.relative_to(package).as_posix()}: {line}" for line in ordering]
    assert [line for line in unbroken if not line.startswith(tuple(LEFT_OUT))] == []
    assert len(STREAM_BREAKS) >= 60


def changed_lines(before: list[str], after: str) -> Iterator[int]:
    """The places of the lines that are changed or removed."""
    lines = ast.unparse(ast.parse(after)).splitlines()
    for kind, start, end, *_ in difflib.SequenceMatcher(None, before, lines, autojunk=False).get_opcodes():
        if kind != "equal":
            yield from range(start, end)
