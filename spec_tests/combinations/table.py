"""The options that are combined, and what a row of them means."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spec_tests.combinations.covering import Row, Values, covering, meetings
from spec_tests.properties.build import PRECISIONS
from spec_tests.properties.description import Description, Node, forms_of
from spec_tests.properties.hunt import replay_line

__all__ = ["OPTIONS", "REFUSALS", "Refusal", "description_of", "is_allowed", "line_of", "plain", "table", "wanted"]

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

_COMMON = {
    "ranks": ("2", "4"),
    "precision": tuple(PRECISIONS),
    "offload": ("no", "yes"),
    "frozen": ("nothing", "a unit", "half a unit"),
    "tied": ("no", "yes"),
    "accumulation": ("none", "without sync", "with sync"),
    "hook": ("none", "communication", "accumulated", "backward"),
    "checkpoint": ("none", "nonreentrant", "reentrant"),
    "optimizer": ("momentum", "adam"),
}
# By door. The first value of an option is the plain one.
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "fsdp1": {
        **_COMMON,
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID),
        "parameters": ("flat", "original"),
        "state": forms_of("fsdp1"),
    },
    "fully_shard": {
        **_COMMON,
        # Freed after forward, kept, and copies of shards on a mesh of two axes.
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"),
        "state": forms_of("fully_shard"),
    },
}
# They decide what happens between two steps, and when.
IN_ITERATION = ("strategy", "parameters", "precision", "offload", "frozen", "accumulation", "hook", "checkpoint")


@dataclass(frozen=True)
class Refusal:
    """Values of two options of the wrapper that exclude each other.

    Attributes:
        values: some values of each of the two.
        error: the kind of the error.
        words: that are in its message, on every rank.
    """

    values: Mapping[str, tuple[str, ...]]
    error: type[Exception]
    words: tuple[str, ...]

    def concerns(self, row: Mapping[str, str]) -> bool:
        """Whether the row has these values."""
        return all(row.get(name) in values for name, values in self.values.items())


REFUSALS = {
    "a hook for hybrid strategies": Refusal(
        {"strategy": HYBRID, "hook": ("communication",)}, AssertionError, ("register_comm_hook", "hybrid")
    ),
    "a flat parameter that is half frozen": Refusal(
        {"parameters": ("flat",), "frozen": ("half a unit",)}, ValueError, ("use_orig_params=True", "requires_grad")
    ),
}


def is_allowed(row: Mapping[str, str]) -> bool:
    """Whether nothing of these values excludes something else of them."""
    return not any(refusal.concerns(row) for refusal in REFUSALS.values())


def wanted(options: Mapping[str, tuple[str, ...]], *, triples: bool) -> Iterator[Values]:
    """All pairs of values, with or without triples of those that take part in an iteration."""
    yield from meetings(options, 2, is_allowed)
    if triples:
        yield from meetings({name: values for name, values in options.items() if name in IN_ITERATION}, 3, is_allowed)


def table(door: str, seed: int = 0, *, triples: bool = False, **fixed: str) -> list[Row]:
    """Rows in which all values meet that are `wanted`; those that are ``fixed`` are in each row."""
    options = {name: (fixed[name],) if name in fixed else values for name, values in OPTIONS[door].items()}
    return covering(options, wanted(options, triples=triples), is_allowed, seed)


def plain(door: str) -> Row:
    """The row of which every value is the plain one."""
    return {name: values[0] for name, values in OPTIONS[door].items()}


def line_of(row: Row, door: str) -> str:
    """The row, and the command that shows it again."""
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in row.items())
    return f"{door} {words}: {replay_line(description_of(row, door))}"


def description_of(row: Mapping[str, str], door: str, seed: int = 0) -> Description:
    """The training run that a row means."""
    num_ranks = int(row["ranks"])
    return Description(
        model=_model(row["frozen"], "" if row["checkpoint"] == "none" else row["checkpoint"]),
        num_ranks=num_ranks,
        door=door,
        strategy=row["strategy"],
        # Of two ranks each has a copy, and nothing is sharded; four are two times two.
        num_replicas=2 if row["strategy"] in HYBRID else 1,
        originals=row.get("parameters") != "flat",
        precision=row["precision"],
        offload=row["offload"] == "yes",
        ties=((0, 5),) if row["tied"] == "yes" else (),
        # One before the state is saved, one after it.
        steps=1,
        micro_batches={"none": (True,), "without sync": (False, True), "with sync": (True, True)}[row["accumulation"]],
        momentum=row["optimizer"] == "momentum",
        adam=row["optimizer"] == "adam",
        hook="" if row["hook"] == "none" else row["hook"],
        resumes=row["state"],
        seed=seed,
    )


def _model(frozen: str, checkpoint: str) -> Node:
    """Four units: one inside another, one of two unequal matrices, and the root, whose layers come first and last.

    Numbers of elements are odd. The ends of the root can be tied, leaves 0 and 5.
    """
    linear = Node("linear", size=3)
    pair = Node("mlp", size=5, unit=True, frozen=frozen == "a unit", checkpoint=checkpoint)
    norm = Node("norm", frozen=frozen == "half a unit")
    inner = Node("linear", size=3, unit=True)
    around = Node("chain", unit=True, checkpoint=checkpoint, children=(norm, Node("own", size=2), inner))
    return Node("chain", children=(linear, pair, around, linear))
