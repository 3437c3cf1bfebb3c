"""One weight on four ranks: sharded, all-gathered, used, resharded; and its gradient in backward.

The weight in the drawing is `DRAWN`, the numbers in the text are those of `REAL`. The package's own arithmetic
determines the shards of both.
"""

import torch

from docs_build.drawing.sketch import Panel, figure, size_of
from minifsdp.engine.shards import shard_of, shard_shape
from minifsdp_tools.formulas import ring_sends

NUM_RANKS = 4
DRAWN, REAL = torch.Size((4, 6)), torch.Size((4096, 4096))
WHOLE = 4 * REAL.numel()
SOURCE = "Drawn from the sharding of fully_shard; minifsdp's formulas give the bytes."


def rows_of(rank: int) -> list[int]:
    """The rows of the drawn weight that a rank stores."""
    rows = torch.arange(DRAWN[0]).view(-1, 1).expand(DRAWN)
    return sorted(set(shard_of(rows, 0, NUM_RANKS, rank).flatten().tolist()))


def draw(caption: str) -> str:
    """The drawing: a panel for each of the six states of the weight and its gradient."""
    sent = size_of(ring_sends(WHOLE, NUM_RANKS))
    part, whole = size_of(4 * shard_shape(REAL, 0, NUM_RANKS, 0).numel()), size_of(WHOLE)
    cut, gathered = [rows_of(rank) for rank in range(NUM_RANKS)], [list(range(DRAWN[0]))] * NUM_RANKS
    used = "Each rank computes with the unsharded weight, on its own batch."
    own = f"Each rank has the unsharded gradient of its own batch, {whole}."
    all_gather = f"An all-gather: each rank sends {sent}, and then has all {whole}."
    mean = f"A reduce-scatter: each rank sends {sent} and receives its rows of the mean, {part}."
    panels = [
        _panel("1. Sharded", cut, f"Each rank stores its rows: {part} of {whole}."),
        _panel("2. All-gathered", gathered, all_gather),
        _panel("3. Used", gathered, used, batch=True),
        _panel("4. Resharded", cut, f"After the layer's forward, each rank keeps {part}. Backward repeats step 2."),
        _panel("5. Gradient", gathered, own, gradient=True),
        _panel("6. Reduced", cut, mean, gradient=True),
    ]
    return figure("weight", panels, caption, SOURCE)


def _panel(title: str, rows: list[list[int]], text: str, *, batch: bool = False, gradient: bool = False) -> Panel:
    owners = {row: rank for rank in range(NUM_RANKS) for row in rows_of(rank)}
    ranks = [[(row, owners[row]) for row in there] for there in rows]
    data = {"ranks": ranks, "size": DRAWN, "batch": batch, "gradient": gradient}
    return Panel(title, data, 6 + NUM_RANKS * (12 * DRAWN[1] + 8), 44 + 12 * DRAWN[0], text)
