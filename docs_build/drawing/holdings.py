"""The memory of each rank: replication and the three stages of ZeRO, drawn for four ranks, computed for any number.

All bytes are those of minifsdp's own formulas, for Adam in float32: 4 for a parameter, 4 for its gradient, 8 for its
two averages. Worked example, 1 billion parameters on 4 ranks, the second stage::

    parameters    unsharded  4 GB
    gradients     a quarter  1 GB
    optimizer     a quarter  2 GB     each rank holds 7 GB
"""

from docs_build.drawing.sketch import Panel, bar, box, figure, label, legend, size_of
from docs_build.reading.papers import model_states

NUM_PARAMETERS = 10**9
# The letter of a kind in a drawing, its name, and its bytes for one parameter.
KINDS = [("p", "parameters", 4), ("g", "gradients", 4), ("o", "optimizer state", 8)]
STAGES = [
    "DDP: every rank stores everything",
    "ZeRO-1: optimizer state is sharded",
    "ZeRO-2: gradients, too",
    "ZeRO-3: parameters, too",
]
SHORT = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
LEGEND = [(kind, f"{name}, {width} bytes for each parameter") for kind, name, width in KINDS]
SOURCE = "Computed by docs_build.reading.papers for 1 billion parameters and Adam in float32 when this page was built."
IN_TORCH = {0: "NO_SHARD", 3: "FULL_SHARD, and fully_shard"}


def is_cut(kind: str, stage: int) -> bool:
    """Whether each rank has only a shard: optimizer state from stage 1 on, gradients from 2 on, parameters in 3."""
    return stage >= {"o": 1, "g": 2, "p": 3}[kind]


def bytes_held(stage: int, num_ranks: int) -> dict[str, float]:
    """The bytes of each kind on each rank at the end of backward."""
    names = {"p": "parameter", "g": "gradient", "o": "optimizer"}
    none = dict.fromkeys(names.values(), 0.0)
    each = {kind: width / num_ranks if is_cut(kind, stage) else width for kind, _, width in KINDS}
    return {kind: model_states(NUM_PARAMETERS, **{**none, name: each[kind]}) for kind, name in names.items()}


def draw_holdings(caption: str) -> str:
    """Four ranks under each stage: the outline of the full memory, and the shard on each rank."""
    return figure([_holding(stage, 4) for stage in range(len(STAGES))], caption, SOURCE, legend(LEGEND))


def _holding(stage: int, num_ranks: int) -> Panel:
    left, whole, gap, parts = 8, 72, 6, []
    for rank in range(num_ranks):
        x, y = left + rank * (whole + gap), 24.0
        parts.append(label(f"rank {rank}", x + whole / 2, 16, "mid soft"))
        for kind, _, width in KINDS:
            height = 5 * width
            parts.append(box(x, y, whole, height))
            # A shard is drawn at its position in the outline, so the shards of all ranks together fill it.
            part = whole / num_ranks if is_cut(kind, stage) else whole
            parts.append(bar(kind, x + (rank * part if is_cut(kind, stage) else 0), y, part, height))
            y += height + 3
    held = sum(bytes_held(stage, num_ranks).values())
    also = f" In minifsdp: {IN_TORCH[stage]}." if stage in IN_TORCH else ""
    text = f"Each rank stores {size_of(held)}; all {num_ranks} together store {size_of(num_ranks * held)}.{also}"
    return Panel(STAGES[stage], parts, left + num_ranks * (whole + gap), y + 2, text)


def draw_bars(caption: str) -> str:
    """The memory of one rank under each stage, on few ranks and on many."""
    return figure([_bars(num_ranks) for num_ranks in (4, 64)], caption, SOURCE, legend(LEGEND))


def _bars(num_ranks: int) -> Panel:
    left, room, parts = 56, 200, []
    largest = sum(bytes_held(0, num_ranks).values())
    for stage, name in enumerate(SHORT):
        x, y = float(left), 8 + 30 * stage
        parts.append(label(name, left - 6, y + 15, "end"))
        for kind, held in bytes_held(stage, num_ranks).items():
            width = room * held / largest
            parts.append(bar(kind, x, y, width, 20))
            x += width
        parts.append(label(size_of(sum(bytes_held(stage, num_ranks).values())), x + 6, y + 15))
    return Panel(f"Each of {num_ranks} ranks stores", parts, left + room + 64, 8 + 30 * len(SHORT))
