"""The counts in the README are correct. Its other numbers are compared where their records are."""

from __future__ import annotations

import re

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording.lessons import recorded
from spec_tools.tests.test_house_rules import MODULES, num_code_lines

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_gives_size_of_full_package() -> None:
    said = re.search(r"([\d,]+) code lines, everything counted", README)
    assert said
    # Rounded to tens.
    assert int(said[1].replace(",", "")) == pytest.approx(sum(map(num_code_lines, MODULES)), abs=75)


def test_picture_caption_matches_its_bytes() -> None:
    picture = (ROOT / "docs" / "assets" / "timeline.svg").read_text(encoding="utf-8")
    said = re.search(r"At most ([\d.]+ MB) of the model's", README)
    assert said
    assert said[1] in picture


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_first_command_takes_documented_time(page: str) -> None:
    assert re.search("about a minute", (ROOT / page).read_text(encoding="utf-8"), re.IGNORECASE)
    assert 40 <= recorded()["tutorials/train_gpt.py"]["seconds"] <= 90
