"""Texts have enough contrast: on one page of each kind, in light and dark mode, with all folded parts open."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.tests.browser import Tab
from docs_build.tests.contrast import contrasts
from docs_build.tests.kinds import KINDS

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

UNFOLD = "document.querySelectorAll('details').forEach((one) => { one.open = true; }); true"


@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("page", KINDS)
def test_every_text_has_enough_contrast(site: Path, tab: Tab, page: str, scheme: str) -> None:
    tab.open((site / page).as_uri())
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}'); {UNFOLD}")
    found = contrasts(tab, "body *")
    assert len(found) > 10
    assert {name: round(ratio, 2) for ratio, name in reversed(found) if ratio < 4.5} == {}


def test_texts_in_pictures_are_compared_with_the_boxes_behind_them(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/schedule.html").as_uri())
    texts = "article svg text"
    assert contrasts(tab, texts)[0][0] > 4.5
    tab.look("document.querySelectorAll('article svg .F rect').forEach((box) => { box.style.fill = '#14694a'; }); true")
    assert contrasts(tab, texts)[0][0] < 1.5


def test_contrast_includes_opacity(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/schedule.html").as_uri())
    tab.look("document.querySelector('figcaption').style.opacity = 0.5; true")
    assert contrasts(tab, "figcaption")[0][0] < 4.5
