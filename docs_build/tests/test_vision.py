"""Elements that differ in colour also differ in another way, or all users can distinguish the colours.

The step player has its own test.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest

from docs_build.tests.browser import Tab
from docs_build.tests.vision import KINDS, Colour, apart

docs = pytest.mark.docs
needs = pytest.mark.needs("mkdocs")

# For each box of each timeline: its stream, its kind, and the colours of its fill and its border.
BOXES = """[...document.querySelectorAll('article svg.minifsdp-timeline')].map((svg) => {
    const bands = [...svg.querySelectorAll('rect.band')].map((one) => one.getBoundingClientRect());
    return [...svg.querySelectorAll('g.box')].map((box) => {
        const rect = box.querySelector('rect'), at = rect.getBoundingClientRect();
        const lane = bands.findIndex((band) => band.top <= at.top + 1 && at.bottom <= band.bottom + 1);
        return [lane, box.classList[1], getComputedStyle(rect).fill, getComputedStyle(rect).stroke];
    });
})"""


def colour(text: str) -> Colour:
    red, green, blue = map(float, re.findall(r"[\d.]+", text)[:3])
    return red, green, blue


def test_colour_distances_match_colour_blindness() -> None:
    green, brown = (120.0, 130.0, 40.0), (150.0, 115.0, 40.0)
    assert apart(green, brown, "deuteranopia") < 10 < apart(green, brown, "tritanopia")
    assert all(apart((0, 0, 255), (255, 255, 0), kind) > 60 for kind in KINDS)
    assert all(apart(brown, brown, kind) == 0 for kind in KINDS)


@docs
@needs
@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("page", ["index.html", "learn/schedule.html", "learn/strategies.html", "streams.html"])
def test_boxes_in_one_track_have_distinguishable_colours(address: str, tab: Tab, page: str, scheme: str) -> None:
    tab.open(address + page)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    pictures: list[list[list[Any]]] = tab.look(BOXES)
    compared = 0
    for boxes in pictures:
        assert boxes
        assert all(stream >= 0 for stream, *_ in boxes)
        for number in {stream for stream, *_ in boxes}:
            looks = {kind: (colour(ground), colour(edge)) for stream, kind, ground, edge in boxes if stream == number}
            for one, other in combinations(looks, 2):
                compared += 1
                seen = {kind: max(map(apart, looks[one], looks[other], [kind] * 2)) for kind in KINDS}
                assert min(seen.values()) > 10, (one, other, seen)
    assert compared


@docs
@needs
def test_parts_of_the_chart_of_strategies_differ_by_pattern(address: str, tab: Tab) -> None:
    tab.open(address + "tools/calculator.html")
    tab.wait_for("!!document.querySelector('.calc-chart .calc-part')")
    patterns = tab.look(
        "[...document.querySelectorAll('.calc-chart')].map((chart) => ["
        "...chart.querySelectorAll('.calc-legend .calc-part')].map((one) => getComputedStyle(one).backgroundImage))"
    )
    several = [of_chart for of_chart in patterns if len(of_chart) > 1]
    assert several
    for of_chart in several:
        assert len({*of_chart}) == len(of_chart), of_chart


@docs
@needs
def test_kinds_of_bytes_and_of_links_differ_by_stripes_and_dashes(address: str, tab: Tab) -> None:
    tab.open(address + "learn/why.html")
    stripes = tab.look(
        "[...document.querySelectorAll('.sketch-legend')].map((legend) => [...legend.querySelectorAll('li svg')].map("
        "(one) => [one.firstElementChild.classList[0], (one.querySelector('.stripes') || one).getAttribute('d')]))"
    )
    assert stripes
    for legend in stripes:
        kinds = {kind: drawn for kind, drawn in legend if kind in ("p", "g", "o")}
        assert len({*kinds.values()}) == len(kinds)
    tab.open(address + "learn/strategies.html")
    dashes = tab.look(
        "['within', 'between'].map((kind) => getComputedStyle(document.querySelector(`.sketch .${kind}.link`))"
        ".strokeDasharray)"
    )
    assert dashes[0] != dashes[1]


@docs
@needs
def test_badges_use_same_text_for_same_colour(address: str, tab: Tab) -> None:
    tab.open(address + "spec.html")
    badges = tab.look("[...document.querySelectorAll('.badge')].map((one) => [one.className, one.textContent])")
    assert len(badges) > 1000
    looks: dict[str, set[str]] = {}
    for look, words in badges:
        looks.setdefault(words, set()).add(look)
    assert {words: names for words, names in looks.items() if not words or len(names) > 1} == {}
