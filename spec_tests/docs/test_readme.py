"""What the README counts is what can be counted; its other figures are compared where their records are."""

from __future__ import annotations

import re

import pytest

from docs_build.lessons import recorded
from docs_build.order import PACKAGE, ROOT
from spec_tests.test_house_rules import APART, MODULES, num_code_lines, text_of

README = (ROOT / "README.md").read_text(encoding="utf-8")


def num_lines(text: str) -> int:
    """Lines that are not blank."""
    return sum(bool(line.strip()) for line in text.splitlines())


def test_the_size_is_that_of_the_package_without_what_stands_apart() -> None:
    house = [module for module in MODULES if not module.startswith(APART)]
    code = sum(map(num_code_lines, house))
    prose = sum(num_lines(text_of(module)) for module in house) - code
    messages = num_lines((PACKAGE / "messages.toml").read_text(encoding="utf-8"))
    said = re.search(r"(\d+) of code, (\d+) of messages and (\d+) of prose", README)
    assert said
    # Rounded to hundreds.
    assert [int(number) for number in said.groups()] == pytest.approx([code, messages, prose], abs=75)


def test_the_picture_is_described_with_the_bytes_that_stand_in_it() -> None:
    picture = (ROOT / "docs" / "assets" / "timeline.svg").read_text(encoding="utf-8")
    said = re.search(r"At most ([\d.]+ MB) of the model's", README)
    assert said
    assert said[1] in picture


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_command_takes_as_long_as_it_is_said_to(page: str) -> None:
    assert re.search("about a minute", (ROOT / page).read_text(encoding="utf-8"), re.IGNORECASE)
    assert 40 <= recorded()["tutorials/train_gpt.py"]["seconds"] <= 90
