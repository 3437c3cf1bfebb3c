"""Combines options: a few rows that together contain all pairs of values, and the training run of a row.

The number of all combinations of the options is about a million. Most defects need only two options. `table` chooses
rows so that each pair of values occurs in some row, and on request also each triple of the options that affect an
iteration. The algorithm is greedy: a row starts with the first missing combination. For each other option, in random
order, it takes the value that adds the most missing combinations. The table is not the smallest, but it is complete.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_tests.random_programs.description import Description, Node, forms_of

__all__ = ["OPTIONS", "REFUSALS", "Row", "concerns", "description_of", "table", "wanted"]

# The value of each option, by name.
Row = dict[str, str]
Values = frozenset[tuple[str, str]]

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_COMMON: dict[str, tuple[str, ...]] = {
    "ranks": ("2", "4"),
    "precision": ("full", "low", "low_summed_full", "full_summed_low"),
    "offload": ("no", "yes"),
    "frozen": ("nothing", "a unit", "half a unit"),
    "tied": ("no", "yes"),
    "accumulation": ("none", "without sync", "with sync"),
    "hook": ("", "communication", "accumulated", "backward"),
    "checkpoint": ("", "nonreentrant", "reentrant"),
    "optimizer": ("momentum", "adam"),
}
# By front end.
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "wrapped": {
        **_COMMON,
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID),
        "parameters": ("flat", "original"),
        "state": forms_of("wrapped"),
    },
    "fully_shard": {
        **_COMMON,
        # Resharded after forward, kept unsharded, and replicated shards on a 2-D mesh.
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"),
        "state": forms_of("fully_shard"),
    },
}
# The options that affect the events between two steps, or their order.
IN_ITERATION = ("strategy", "parameters", "precision", "offload", "frozen", "accumulation", "hook", "checkpoint")

# Values of two options of the wrapper that exclude each other, the type of the error, and parts of its message.
REFUSALS: dict[str, tuple[dict[str, tuple[str, ...]], type[Exception], tuple[str, ...]]] = {
    "a hook for hybrid strategies": (
        {"strategy": HYBRID, "hook": ("communication",)},
        AssertionError,
        ("register_comm_hook", "hybrid"),
    ),
    "a flat parameter that is half frozen": (
        {"parameters": ("flat",), "frozen": ("half a unit",)},
        ValueError,
        ("use_orig_params=True", "requires_grad"),
    ),
}


def concerns(refusal: str, row: Mapping[str, str]) -> bool:
    """Whether a row contains values that exclude each other."""
    values, _, _ = REFUSALS[refusal]
    return all(row.get(name) in several for name, several in values.items())


def wanted(
    options: Mapping[str, Sequence[str]], *, triples: bool = False, refusals: Sequence[str] = (*REFUSALS,)
) -> Iterator[Values]:
    """All pairs of values, and optionally all triples in an iteration, without those of ``refusals``."""
    in_iteration = [name for name in options if name in IN_ITERATION]
    of_three = itertools.combinations(in_iteration, 3) if triples else []
    for names in (*itertools.combinations(options, 2), *of_three):
        for values in itertools.product(*(options[name] for name in names)):
            row = dict(zip(names, values, strict=True))
            if not any(concerns(refusal, row) for refusal in refusals):
                yield frozenset(row.items())


def table(
    options: Mapping[str, Sequence[str]],
    seed: int = 0,
    *,
    triples: bool = False,
    refusals: Sequence[str] = (*REFUSALS,),
) -> list[Row]:
    """Rows that contain all `wanted` combinations. The same seed gives the same rows."""
    dice = random.Random(seed)
    missing = dict.fromkeys(wanted(options, triples=triples, refusals=refusals))
    sizes = (2, 3) if triples else (2,)
    rows = []

    def gain(row: Row, name: str, value: str) -> int:
        """The number of missing combinations that a value would add to the row."""
        others = (some for size in sizes for some in itertools.combinations(row.items(), size - 1))
        return sum(frozenset((*some, (name, value))) in missing for some in others)

    while missing:
        row = dict(sorted(next(iter(missing))))
        for name in dice.sample(list(options), len(options)):
            if name not in row:
                possible = [v for v in options[name] if not any(concerns(r, {**row, name: v}) for r in refusals)]
                dice.shuffle(possible)
                row[name] = max(possible, key=lambda value, name=name: gain(row, name, value))
        for size in sizes:
            for some in itertools.combinations(row.items(), size):
                missing.pop(frozenset(some), None)
        rows.append({name: row[name] for name in options})
    return rows


def description_of(row: Mapping[str, str], api: str, seed: int = 0) -> Description:
    """The training run of a row."""
    micro_batches: dict[str, Any] = {"none": (True,), "without sync": (False, True), "with sync": (True, True)}
    return Description(
        model=_model(row["frozen"], row["checkpoint"]),
        num_ranks=int(row["ranks"]),
        api=api,
        strategy=row["strategy"],
        # Two ranks hold one copy each, and nothing is sharded; four ranks form a 2x2 mesh.
        num_replicas=2 if row["strategy"] in HYBRID else 1,
        originals=row.get("parameters") != "flat",
        precision=row["precision"],
        offload=row["offload"] == "yes",
        ties=((0, 5),) if row["tied"] == "yes" else (),
        # One step before the state is saved; the comparison with the loaded model adds another.
        steps=1,
        micro_batches=micro_batches[row["accumulation"]],
        momentum=row["optimizer"] == "momentum",
        adam=row["optimizer"] == "adam",
        hook=row["hook"],
        resumes=row["state"],
        seed=seed,
    )


def _model(frozen: str, checkpoint: str) -> Node:
    """Four units: one inside another, one with two unequal matrices, and the root with the first and the last layer.

    Numbers of elements are odd. The first and the last layer, leaves 0 and 5, can be tied.
    """
    linear = Node("linear", size=3)
    pair = Node("mlp", size=5, unit=True, frozen=frozen == "a unit", checkpoint=checkpoint)
    norm = Node("norm", frozen=frozen == "half a unit")
    inner = Node("linear", size=3, unit=True)
    around = Node("chain", unit=True, checkpoint=checkpoint, children=(norm, Node("own", size=2), inner))
    return Node("chain", children=(linear, pair, around, linear))
