"""Draws the order of the operations in one training step: boxes on the streams, and an arrow for each wait.

A box is a `Moment`. Its column is one more than that of the latest box that must end before it begins::

    compute     copy   F0              F0 is in column 3, because the copy of column 2 is before it
    gather  AG0        AG1             AG1 is in column 3 too: it has waited for the copy and for nothing later

So boxes of one column are not ordered, and can run at the same time. Boxes of one row always run in order. NCCL also
runs the collectives of one group in the order of their issue, so these are in different columns. An arrow between rows
shows that a box waits for another; arrows that follow from others are omitted, and NCCL's order has no arrows. If the
CPU stops, arrows lead through its row, because later launches come after the operations that it has waited for.

A free (a red mark) is an action of the CPU, which does not need to stop for it. The mark is drawn behind the last box
of the compute stream that the CPU had launched before.

Spec: SIM-11.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

from minifsdp.trace import Event
from minifsdp_tools import timeline
from spec_tests.harness.simulated import IssueOrder
from spec_tests.streams.steps import ROWS, Moment, Step

__all__ = ["arrows", "columns", "picture"]

LEFT, COLUMN, BOX, ROW, GAP = 84, 49, 37, 24, 26  # in pixels
LEAST_WIDTH = 700  # so that the heading fits

STYLE = "".join(
    f".minifsdp-timeline .arrow-{kind}{{stroke:var(--{ink});fill:none;stroke-width:1.3}}"
    f" .minifsdp-timeline .head-{kind}{{fill:var(--{ink})}}\n"
    for kind, ink in [*((kind, f"{kind}-ink") for kind in timeline.BOXES), ("plain", "soft")]
) + (
    ".minifsdp-timeline .plain rect{fill:var(--paper);stroke:var(--soft);stroke-width:.8}"
    " .minifsdp-timeline .plain text{fill:var(--soft)}\n"
)
WORDS = {
    "copy": "gathered pieces brought into place",
    "pack": "gradients brought into the row that is sent",
    "loss": "the loss, and the beginning of backward",
    "WAIT": "the CPU is stopped by the rate limiter",
}


def columns(boxes: list[Moment], issued: IssueOrder) -> dict[Moment, int]:
    """The column of each box, from 1."""
    found: dict[Moment, int] = {}
    for box in boxes:
        found[box] = 1 + max((found[other] for other in found if other.is_before(box, issued)), default=0)
    return found


def arrows(boxes: list[Moment]) -> list[tuple[Moment, Moment]]:
    """Pairs of boxes in different rows that are ordered directly, without another box between them."""
    ordered = [(one, other) for one in boxes for other in boxes if one.is_before(other)]
    before = set(ordered)
    return [
        (one, other)
        for one, other in ordered
        if one.row != other.row and not any((one, box) in before and (box, other) in before for box in boxes)
    ]


def picture(title: str, step: Step) -> str:
    """The picture as SVG."""
    boxes = [moment for moment in step.moments if moment.kind != "FREE"]
    column = columns(boxes, step.order)
    width = max(LEAST_WIDTH, LEFT + COLUMN * max(column.values()) + 16)
    sheet = timeline._Sheet(width, 1.0)
    rules = "Boxes of one row run in order; an arrow is a wait. Boxes of one column may run at the same time."
    events = [Event(moment.kind, moment.unit, 0.0, 0.0) for moment in step.moments]
    top = timeline._draw_heading(sheet, events, title, rules)
    rows = [row for row in ROWS if row == "CPU" or any(box.row == row for box in boxes)]
    y_of = {row: top + (ROW + GAP) * number for number, row in enumerate(rows)}
    for row, y in y_of.items():
        sheet.ground.append(f'<rect class="band" x="{LEFT}" y="{y}" width="{width - LEFT - 8}" height="{ROW}"/>')
        sheet.text(LEFT - 10, y + 16, "soft end", row.removesuffix(" stream"))
    place = {box: (LEFT + COLUMN * (column[box] - 1) + 8, y_of[box.row]) for box in boxes}
    for one, other in arrows(boxes):
        sheet.shapes.append(_arrow(one, place[one], place[other]))
    for box in boxes:
        sheet.shapes.append(_box(box, *place[box]))
    _draw_frees(sheet, step, place, y_of["CPU"])
    drawn = sheet.finished(y_of[rows[-1]] + ROW + 14, title)
    return drawn.replace("</style>", f"{STYLE}</style>", 1)


def _box(box: Moment, x: float, y: float) -> str:
    kind = box.kind if box.kind in timeline.BOXES else "plain"
    meaning = WORDS.get(box.kind) or timeline._SHAPES.meanings[box.kind]
    operators = ", ".join(operation.name for operation in box.operations)
    tip = f"{box.name}: {meaning}" + (f" ({operators})" if operators else "")
    return (
        f'<g class="box {kind}"><title>{escape(tip)}</title><rect x="{x}" y="{y + 2}" width="{BOX}" '
        f'height="{ROW - 4}" rx="2.5"/><text x="{x + BOX / 2}" y="{y + 16}">{box.name}</text></g>'
    )


def _arrow(one: Moment, start: tuple[float, float], end: tuple[float, float]) -> str:
    """An arrow from the edge of one box that is nearer to the other row, to the left half of the other box."""
    is_down = end[1] > start[1]
    x1, y1 = start[0] + BOX - 8, start[1] + (ROW - 2 if is_down else 2)
    x2, y2 = end[0] + 8, end[1] + (2 if is_down else ROW - 2)
    bend, tip = (10, 5) if is_down else (-10, -5)
    kind = one.kind if one.kind in timeline.BOXES else "plain"
    line = f"M{x1} {y1}C{x1} {y1 + bend} {x2} {y2 - tip - bend} {x2} {y2 - tip}"
    return f'<path class="arrow-{kind}" d="{line}"/><path class="head-{kind}" d="M{x2 - 3} {y2 - tip}h6L{x2} {y2}z"/>'


def _draw_frees(sheet: timeline._Sheet, step: Step, place: Mapping[Moment, tuple[float, float]], y: float) -> None:
    x = float(LEFT)
    for moment in step.moments:
        if moment.kind == "FREE":
            tip = f"{moment.name}: the memory is given back"
            sheet.shapes.append(timeline._SHAPES.mark("FREE", x, y + ROW / 2, tip))
        elif moment.row == "compute stream":
            x = place[moment][0] + BOX + (COLUMN - BOX) / 2
