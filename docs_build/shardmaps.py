"""The elements that each rank holds, drawn from the arithmetic of both layouts: a weight of (3, 2) and a bias of 3."""

from __future__ import annotations

import torch

from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.shards import padded_shard_numel, shard_of

__all__ = ["draw"]

SHAPES = {"w": torch.Size((3, 2)), "b": torch.Size((3,))}
NUM_RANKS = 2
CELL, GAP, LEFT = 30, 12, 156

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
        KeyError: there is no picture with that name.
    """
    return {"layouts": _layouts, "checkpoints": _checkpoints}[name]()


def _layouts() -> str:
    rows = [
        ("flat parameter", _flat_row()),
        ("per parameter: all-gathered", _gathered()),
        ("per parameter: sorted", _whole()),
    ]
    return _picture("The elements of each rank", "sends it", rows)


def _checkpoints() -> str:
    whole = [cell for cell in _flat_row() if cell[0] != "."]
    owner = dict(whole)
    rows = [("full: on every rank", whole)]
    for rank in range(NUM_RANKS):
        labels = [label for name in SHAPES for label, _ in _sent(name, rank) if label != "."]
        rows.append((f"sharded: on rank {rank}", [(label, owner[label]) for label in labels]))
    for rank in range(NUM_RANKS):
        rows.append((f"local: on rank {rank}", [cell for cell in _flat_row() if cell[1] == rank]))
    return _picture("What a state dict holds", "stores it while training", rows)


def _picture(title: str, verb: str, rows: list[tuple[str, list[tuple[str, int]]]]) -> str:
    """Rows of cells, each with its label and the rank that determines its colour."""
    parts, y = [], 40
    for name, cells in rows:
        parts.append(f'<text class="soft" x="8" y="{y + 20}">{name}</text>')
        for place, (label, rank) in enumerate(cells):
            kind = f"r{rank}" if label != "." else "pad"
            x = LEFT + 30 + place * CELL
            parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="3"/>')
            parts.append(f'<text x="{x + 14}" y="{y + 19}" text-anchor="middle">{label}</text>')
        y += CELL + GAP
    step = 60 + 7 * len("rank 0 " + verb)
    legend = (
        f'<rect class="r0" x="8" y="6" width="14" height="14" rx="2"/><text x="28" y="18">rank 0 {verb}</text>'
        f'<rect class="r1" x="{step}" y="6" width="14" height="14" rx="2"/>'
        f'<text x="{step + 20}" y="18">rank 1 {verb}</text>'
        f'<rect class="pad" x="{2 * step}" y="6" width="14" height="14" rx="2"/>'
        f'<text x="{2 * step + 20}" y="18">padding</text>'
    )
    width = max(LEFT + 30 + CELL * max(len(cells) for _, cells in rows) + 16, 2 * step + 80)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="shardmap" role="img" viewBox="0 0 {width} {y}">'
        f"<title>{title}</title><style>{_STYLE}</style>{legend}{''.join(parts)}</svg>"
    )


def _labels() -> list[str]:
    return [f"{name}{n}" for name, shape in SHAPES.items() for n in range(shape.numel())]


def _flat_row() -> list[tuple[str, int]]:
    sharding = FlatSharding(tuple(shape.numel() for shape in SHAPES.values()), NUM_RANKS)
    labels = _labels() + ["."] * (sharding.padded_numel - sharding.numel)
    return [(label, place // sharding.shard_numel) for place, label in enumerate(labels)]


def _gathered() -> list[tuple[str, int]]:
    return [cell for rank in range(NUM_RANKS) for name in SHAPES for cell in _sent(name, rank)]


def _whole() -> list[tuple[str, int]]:
    return [cell for name in SHAPES for rank in range(NUM_RANKS) for cell in _sent(name, rank)]


def _sent(name: str, rank: int) -> list[tuple[str, int]]:
    shape = SHAPES[name]
    numbers = torch.arange(shape.numel()).view(shape)
    labels = [f"{name}{n}" for n in shard_of(numbers, 0, NUM_RANKS, rank).flatten().tolist()]
    num_padding = padded_shard_numel(shape, 0, NUM_RANKS) - len(labels)
    return [(label, rank) for label in [*labels, *["."] * num_padding]]
