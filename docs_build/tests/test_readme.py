"""The numbers in the README are those of the package and of the records."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from docs_build.reading.order import ROOT, reading_order
from docs_build.recording import results
from docs_build.recording.lessons import FIRST_PAGE, recorded
from spec_tools.size import sizes

README = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
SIZES = {
    "minifsdp, minifsdp_gloo and minifsdp_tools": "minifsdp, its transport and its tools, everything",
    "minifsdp": "minifsdp without `minifsdp_gloo` and `minifsdp_tools`",
    "minifsdp: fully_shard and all that it imports": "minifsdp, `fully_shard` and all that it imports",
    "minifsdp: the same without cases and checks": "minifsdp, the same without cases and checks",
    "torch: FSDP1 and FSDP2": "torch, FSDP1 and FSDP2",
    "torch: fully_shard": "torch, `fully_shard`",
}


@pytest.mark.parametrize("what", SIZES)
def test_readme_gives_present_sizes(what: str) -> None:
    if what.startswith("torch") and not torch.__version__.startswith("2.13."):
        pytest.skip("the README gives the sizes of torch 2.13")
    said = re.search(re.escape(f"| {SIZES[what]} | ") + r"([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", README)
    assert said
    size = sizes()[what]
    given = [int(number.replace(",", "")) for number in said.groups()]
    assert given == pytest.approx([size.statements, size.tokens, size.lines], rel=0.01)


def test_readme_gives_the_results_of_the_record() -> None:
    rows = results.recorded()["rows"].values()
    assert f"The last recorded run covers {len(rows)} requirements." in " ".join(README.split())
    lines = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", README, re.MULTILINE))
    assert tuple(lines) == results.BACKENDS
    for backend, line in lines.items():
        kinds = Counter(row["kinds"].get(backend, "none") for row in rows)
        proven = sum(row["results"][backend] == "proven" for row in rows)
        shown = [proven, *(kinds[kind] for kind in results.KINDS), len(rows) - proven]
        assert line == " | ".join(map(str, shown)), backend


def test_readme_and_home_page_have_the_same_first_command_and_its_time() -> None:
    (command,) = re.findall(r"^python -m pip install .*train_gpt\.py$", HOME, re.MULTILINE)
    assert command in README.splitlines()
    assert "about a minute" in README.lower()
    assert "about a minute" in HOME.lower()
    assert 40 <= recorded()["tutorials/train_gpt.py"]["seconds"] <= 90
    assert f"Recorded on {recorded()[FIRST_PAGE]['date']}" in " ".join(README.split())


def test_readme_and_the_page_of_modules_begin_with_the_reading_order() -> None:
    first = [name for _, _, names in reading_order()[:2] for name in names]
    linked = re.findall(r"\(minifsdp/([\w/]+\.py)\)", README.partition("To read the source without the site")[2])
    assert linked == first[: len(linked)]
    assert len(linked) >= 10
    order = (ROOT / "docs" / "modules.md").read_text(encoding="utf-8").partition("## Reading order")[2]
    said = re.findall(r"[\w/]+(?= ->|`)", order.partition("FSDP2 comes first")[0])
    assert [name.rpartition("/")[2] for name in said] == [name.rpartition("/")[2].removesuffix(".py") for name in first]
