"""People who lack one kind of cone can distinguish the boxes of a timeline.

Simulates colours with the method of Machado, Oliveira and Fernandes (2009): one matrix for each kind, applied to linear
light. Differences are distances in the Lab colour space. A distance of 10 is visible at a glance.
"""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest

from docs_build.tests.browser import Tab

Numbers = tuple[float, ...]
KINDS = {
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)
# For each box of a timeline: the top of its track, its kind, and the colours of its fill and its border.
BOX = """[[...e.ownerSVGElement.querySelectorAll('rect.band')].findIndex((band) => {
    const [at, inside] = [band.getBoundingClientRect(), e.querySelector('rect').getBoundingClientRect()];
    return at.top <= inside.top + 1 && inside.bottom <= at.bottom + 1; }), e.classList[1],
    ...['fill', 'stroke'].map((part) => getComputedStyle(e.querySelector('rect'))[part])]"""


def times(matrix: tuple[Numbers, ...], vector: Numbers) -> Numbers:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def lab(colour: str, kind: str) -> Numbers:
    """A colour as seen with this kind of colour blindness."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    seen = tuple(min(1.0, max(0.0, value)) for value in times(KINDS[kind], linear))
    shares = [value / white for value, white in zip(times(TO_XYZ, seen), WHITE, strict=True)]
    x, y, z = (math.cbrt(share) if share > 0.008856 else 7.787 * share + 16 / 116 for share in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("page", ["index.html", "learn/schedule.html", "learn/strategies.html", "streams.html"])
def test_boxes_in_one_track_have_distinguishable_colours(address: str, tab: Tab, page: str, scheme: str) -> None:
    tab.open(address + page)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    boxes = {tuple(box) for box in tab.each("article svg.minifsdp-timeline g.box", BOX)}
    pairs = [pair for pair in combinations(boxes, 2) if pair[0][0] == pair[1][0] and pair[0][1] != pair[1][1]]
    assert pairs
    for one, other in pairs:
        for kind in KINDS:
            distances = [math.dist(lab(one[part], kind), lab(other[part], kind)) for part in (2, 3)]
            assert max(distances) > 10, (one, other, kind)
