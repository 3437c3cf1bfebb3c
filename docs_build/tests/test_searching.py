"""The search index contains the text of a page, but neither its navigation nor the text of its pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

# Navigation; badges and their labels; code chips; axis ticks, boxes and sources of pictures.
NOT_TEXT = (
    r"in reading order|of \d+ tutorials|On this page:|[←→] (?:engine|fsdp)|¶"
    r"|(?:never run|not run|open|passed|proven|in part|only)(?:CPU|simulated|CUDA)"
    r"|\bline \d+<|Computed while this page was built, by"
    r"|, for \d+\.\d+ ms|Milliseconds of the CPU clock since the end|Recorded on 20"
)


def documents(site: Path) -> list[dict[str, Any]]:
    text = (site / "search" / "documents.js").read_text(encoding="utf-8")
    return list(json.loads(text.partition("=")[2].rstrip(";\n")))


def test_search_excerpts_contain_only_text_of_the_page(site: Path) -> None:
    found = {one["location"]: re.search(f".{{0,40}}(?:{NOT_TEXT})", one["text"]) for one in documents(site)}
    assert {place: match[0] for place, match in found.items() if match} == {}


def test_every_page_can_be_found(site: Path) -> None:
    known = {one["location"].partition("#")[0] for one in documents(site)}
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    # Only the answers for teachers are left out, by their front matter.
    assert pages - known == {"teach/answers.html"}
    assert known <= pages


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("spec.html", "PREF-16"),
        ("read/engine/unit.html", "The state machine of one unit"),
        ("learn/schedule.html", "Units leave"),
        ("lab/slow_rank.html", "a separate process group with a longer time-out"),
        ("troubleshoot.html", "mixed torch.Tensor and DTensor"),
    ],
)
def test_search_index_contains_the_texts_of_the_pages(site: Path, page: str, words: str) -> None:
    texts = [one["title"] + one["text"] for one in documents(site) if one["location"].startswith(page)]
    assert any(words in re.sub("<[^>]+>", "", text) for text in texts)
