"""Combines options: a few rows that together contain all pairs of values, and the training run of a row.

The number of all combinations of the options is about a million. Most defects need only two options. `table` chooses
rows so that each pair of values occurs in some row, and on request also each triple of the options that affect an
iteration. The algorithm is greedy: each row contains the first missing combination. Several random rows do so, and it
takes the one with the most missing combinations. The table is not the smallest, but it is complete.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any

from spec_tests.random_programs.description import Description, Node, forms_of

# The value of each option, by name. All but `frozen` and `checkpoint` are fields of a description.
Row = dict[str, Any]
Options = Mapping[str, tuple[Any, ...]]

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
# Those in the first lines affect the events between two steps, or their order.
_COMMON: dict[str, tuple[Any, ...]] = {
    "precision": ("full", "low", "low_summed_full", "full_summed_low"),
    "offload": (False, True),
    "frozen": ("nothing", "a unit", "half a unit"),
    "micro_batches": ((True,), (False, True), (True, True)),
    "hook": ("", "communication", "accumulated", "backward"),
    "checkpoint": ("", "nonreentrant", "reentrant"),
    "ties": (0, 1),
    "adam": (False, True),
}
# By front end.
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "wrapped": {
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID),
        "originals": (False, True),
        **_COMMON,
        "resumes": forms_of("wrapped"),
    },
    # Resharded after forward, kept unsharded, and replicated shards on a 2-D mesh.
    "fully_shard": {
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"),
        **_COMMON,
        "resumes": forms_of("fully_shard"),
    },
}
NOT_IN_ITERATION = ("ties", "adam", "resumes")
# Values of two options of the wrapper that exclude each other, the type of the error, and parts of its message.
REFUSALS: dict[str, tuple[dict[str, tuple[Any, ...]], type[Exception], tuple[str, ...]]] = {
    "a hook for hybrid strategies": (
        {"strategy": HYBRID, "hook": ("communication",)},
        AssertionError,
        ("register_comm_hook", "hybrid"),
    ),
    "a flat parameter that is half frozen": (
        {"originals": (False,), "frozen": ("half a unit",)},
        ValueError,
        ("use_orig_params=True", "requires_grad"),
    ),
}
NUM_CANDIDATES = 50


def is_refused(row: Row, refusals: Iterable[str] = REFUSALS) -> bool:
    """Whether a row contains values that exclude each other."""
    excluded = [REFUSALS[name][0] for name in refusals]
    return any(all(row.get(name) in values for name, values in each.items()) for each in excluded)


def combinations(row: Row, *, triples: bool) -> set[Any]:
    """The pairs in a row, and optionally the triples in an iteration."""
    in_iteration = [item for item in row.items() if item[0] not in NOT_IN_ITERATION]
    found: set[Any] = {*itertools.combinations(row.items(), 2)}
    return found.union(itertools.combinations(in_iteration, 3)) if triples else found


def table(options: Options, seed: int = 0, *, triples: bool = False, refusals: Iterable[str] = REFUSALS) -> list[Row]:
    """Rows that contain all combinations that are not refused. The same seed gives the same rows."""
    names = combinations(dict.fromkeys(options), triples=triples)
    products = [itertools.product(*([(name, value) for value in options[name]] for name, _ in some)) for some in names]
    wanted = (some for some in itertools.chain(*products) if not is_refused(dict(some), refusals))
    missing = dict.fromkeys(sorted(wanted, key=repr))
    dice = random.Random(seed)
    rows = []
    while missing:
        first = dict(next(iter(missing)))
        drawn = [{name: dice.choice(options[name]) for name in options} | first for _ in range(NUM_CANDIDATES)]
        possible = [row for row in drawn if not is_refused(row, refusals)]
        rows.append(max(possible, key=lambda row: len(missing.keys() & combinations(row, triples=triples))))
        for some in combinations(rows[-1], triples=triples):
            missing.pop(some, None)
    return rows


def description_of(row: Row, api: str, seed: int = 0) -> Description:
    """The training run of a row. Hybrid strategies run on a mesh of 2 x 2 ranks, the others on two ranks."""
    fields = {name: value for name, value in row.items() if name not in ("frozen", "checkpoint")}
    is_hybrid = row["strategy"] in HYBRID
    return Description(
        model=_model(row["frozen"], row["checkpoint"]),
        num_ranks=4 if is_hybrid else 2,
        num_replicas=2 if is_hybrid else 1,
        api=api,
        # One step before the state is saved; the comparison with the loaded model adds another.
        steps=1,
        momentum=not row["adam"],
        seed=seed,
        **{"originals": True, **fields},
    )


def _model(frozen: str, checkpoint: str) -> Node:
    """Four units: one inside another, one with two unequal matrices, and the root with the first and the last layer.

    Numbers of elements are odd. Only the first and the last layer can be tied.
    """
    linear = Node("linear", size=3)
    pair = Node("mlp", size=5, unit=True, frozen=frozen == "a unit", checkpoint=checkpoint)
    norm = Node("norm", frozen=frozen == "half a unit")
    inner = Node("linear", size=3, unit=True)
    around = Node("chain", unit=True, checkpoint=checkpoint, children=(norm, Node("own", size=2), inner))
    return Node("chain", children=(linear, pair, around, linear))
