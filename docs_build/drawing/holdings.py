"""The memory of each rank: replication and the three stages of ZeRO, drawn for four ranks, computed for any number.

All bytes are those of minifsdp's own formulas, for Adam in float32: 4 for a parameter, 4 for its gradient, 8 for its
two averages. Worked example, 1 billion parameters on 4 ranks, the second stage::

    parameters    unsharded  4 GB
    gradients     a quarter  1 GB
    optimizer     a quarter  2 GB     each rank holds 7 GB
"""

from docs_build.drawing.sketch import Panel, figure, size_of
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
    return figure("holding", [_holding(stage, 4) for stage in range(len(STAGES))], caption, SOURCE, LEGEND)


def _holding(stage: int, num_ranks: int) -> Panel:
    kinds = [(kind, width, is_cut(kind, stage)) for kind, _, width in KINDS]
    held = sum(bytes_held(stage, num_ranks).values())
    also = f" In minifsdp: {IN_TORCH[stage]}." if stage in IN_TORCH else ""
    text = f"Each rank stores {size_of(held)}; all {num_ranks} together store {size_of(num_ranks * held)}.{also}"
    height = 26 + sum(5 * width + 3 for _, width, _ in kinds)
    return Panel(STAGES[stage], {"kinds": kinds, "num_ranks": num_ranks}, 8 + 78 * num_ranks, height, text)


def draw_bars(caption: str) -> str:
    """The memory of one rank under each stage, on few ranks and on many."""
    return figure("stages", [_bars(num_ranks) for num_ranks in (4, 64)], caption, SOURCE, LEGEND)


def _bars(num_ranks: int) -> Panel:
    held = [bytes_held(stage, num_ranks) for stage in range(len(SHORT))]
    sums = [sum(by_kind.values()) for by_kind in held]
    rows = list(zip(SHORT, held, map(size_of, sums), strict=True))
    return Panel(f"Each of {num_ranks} ranks stores", {"rows": rows, "most": sums[0]}, 320, 8 + 30 * len(SHORT))
