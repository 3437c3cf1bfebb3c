"""Who holds which elements: drawn from the arithmetic of the two layouts, for a weight of (3, 2) and a bias of 3."""

from __future__ import annotations

import torch

from minifsdp.engine.cut import Cut
from minifsdp.engine.partition import Partition

__all__ = ["draw"]

SHAPES = {"w": torch.Size((3, 2)), "b": torch.Size((3,))}
NUM_RANKS = 2
CELL, GAP, LEFT = 30, 26, 150

_STYLE = """
.shardmap{font:13px ui-sans-serif,system-ui,sans-serif;
--r0:#d7e5fb;--r1:#fbe3c4;--pad:#eceff3;--ink:#22272e;--soft:#667080;--line:#8fa0b5}
[data-md-color-scheme=slate] .shardmap{
--r0:#1d3b69;--r1:#5b3d14;--pad:#262c34;--ink:#e4e8ee;--soft:#98a2b0;--line:#57657a}
.shardmap text{fill:var(--ink)} .shardmap .soft{fill:var(--soft)} .shardmap rect{stroke:var(--line)}
.shardmap .r0{fill:var(--r0)} .shardmap .r1{fill:var(--r1)} .shardmap .pad{fill:var(--pad);stroke-dasharray:3 2}
"""


def draw(name: str) -> str:
    """The picture, as SVG.

    Raises:
        KeyError: there is none of that name.
    """
    return {"layouts": _layouts}[name]()


def _layouts() -> str:
    rows = [
        ("flat: the row", _flat_row()),
        ("per parameter: gathered", _gathered()),
        ("per parameter: whole", _whole()),
    ]
    parts, y = [], 34
    for title, cells in rows:
        parts.append(f'<text class="soft" x="8" y="{y + 20}">{title}</text>')
        for place, (label, rank) in enumerate(cells):
            kind = f"r{rank}" if label != "." else "pad"
            x = LEFT + 30 + place * CELL
            parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="3"/>')
            parts.append(f'<text x="{x + 14}" y="{y + 19}" text-anchor="middle">{label}</text>')
        y += CELL + GAP
    legend = (
        '<rect class="r0" x="8" y="6" width="14" height="14" rx="2"/><text x="28" y="18">rank 0 sends it</text>'
        '<rect class="r1" x="150" y="6" width="14" height="14" rx="2"/><text x="170" y="18">rank 1 sends it</text>'
        '<rect class="pad" x="292" y="6" width="14" height="14" rx="2"/><text x="312" y="18">padding</text>'
    )
    width = LEFT + 30 + CELL * max(len(cells) for _, cells in rows) + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="shardmap" role="img" viewBox="0 0 {width} {y}">'
        f"<title>Who holds what</title><style>{_STYLE}</style>{legend}{''.join(parts)}</svg>"
    )


def _labels() -> list[str]:
    return [f"{name}{n}" for name, shape in SHAPES.items() for n in range(shape.numel())]


def _flat_row() -> list[tuple[str, int]]:
    partition = Partition(tuple(shape.numel() for shape in SHAPES.values()), NUM_RANKS)
    labels = _labels() + ["."] * (partition.padded_numel - partition.numel)
    return [(label, place // partition.shard_numel) for place, label in enumerate(labels)]


def _cuts() -> dict[str, Cut]:
    return {name: Cut(shape, 0, NUM_RANKS) for name, shape in SHAPES.items()}


def _gathered() -> list[tuple[str, int]]:
    return [cell for rank in range(NUM_RANKS) for name in SHAPES for cell in _sent(name, rank)]


def _whole() -> list[tuple[str, int]]:
    return [cell for name in SHAPES for rank in range(NUM_RANKS) for cell in _sent(name, rank)]


def _sent(name: str, rank: int) -> list[tuple[str, int]]:
    cut = _cuts()[name]
    numbers = torch.arange(cut.shape.numel()).view(cut.shape)
    labels = [f"{name}{n}" for n in cut.local_part(numbers, rank).flatten().tolist()]
    return [(label, rank) for label in [*labels, *["."] * (cut.chunk_numel - len(labels))]]
