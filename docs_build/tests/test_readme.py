"""The counts in the README are correct. Its other numbers are compared where their records are."""

from __future__ import annotations

import re

import pytest
import torch

from docs_build.reading.order import ROOT
from docs_build.recording.lessons import recorded
from spec_tools.size import sizes

README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = {
    "minifsdp, minifsdp_gloo and minifsdp_tools": "minifsdp, its transport and its tools, everything",
    "minifsdp": "minifsdp without `minifsdp_gloo` and `minifsdp_tools`",
    "minifsdp: fully_shard and all that it imports": "minifsdp, `fully_shard` and all that it imports",
    "minifsdp: the same without cases and checks": "minifsdp, the same without cases and checks",
    "torch: FSDP1 and FSDP2": "torch, FSDP1 and FSDP2",
    "torch: fully_shard": "torch, `fully_shard`",
}


@pytest.mark.parametrize("what", ROWS)
def test_readme_gives_present_sizes(what: str) -> None:
    if what.startswith("torch") and not torch.__version__.startswith("2.13."):
        pytest.skip("the README gives the sizes of torch 2.13")
    said = re.search(re.escape(f"| {ROWS[what]} | ") + r"([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", README)
    assert said
    size = sizes()[what]
    given = [int(number.replace(",", "")) for number in said.groups()]
    assert given == pytest.approx([size.statements, size.tokens, size.lines], rel=0.01)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_first_command_takes_documented_time(page: str) -> None:
    assert "about a minute" in (ROOT / page).read_text(encoding="utf-8").lower()
    assert 40 <= recorded()["tutorials/train_gpt.py"]["seconds"] <= 90
