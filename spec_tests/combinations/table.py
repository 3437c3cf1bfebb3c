"""The options that are combined, and the training run of a row."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spec_tests.combinations.covering import Row, Values, covering, meetings
from spec_tests.random_programs.description import Description, Node, forms_of
from spec_tests.random_programs.judge import replay_line

__all__ = ["OPTIONS", "REFUSALS", "Refusal", "description_of", "is_allowed", "line_of", "plain", "table", "wanted"]

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

_COMMON = {
    "ranks": ("2", "4"),
    "precision": ("full", "low", "low_summed_full", "full_summed_low"),
    "offload": ("no", "yes"),
    "frozen": ("nothing", "a unit", "half a unit"),
    "tied": ("no", "yes"),
    "accumulation": ("none", "without sync", "with sync"),
    "hook": ("none", "communication", "accumulated", "backward"),
    "checkpoint": ("none", "nonreentrant", "reentrant"),
    "optimizer": ("momentum", "adam"),
}
# By front end. The first value of an option is its default.
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "fsdp1": {
        **_COMMON,
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID),
        "parameters": ("flat", "original"),
        "state": forms_of("fsdp1"),
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


@dataclass(frozen=True)
class Refusal:
    """Values of two options of the wrapper that exclude each other.

    Attributes:
        values: for each of the two options, the values concerned.
        error: type of the error.
        words: parts of its message, on every rank.
    """

    values: Mapping[str, tuple[str, ...]]
    error: type[Exception]
    words: tuple[str, ...]

    def concerns(self, row: Mapping[str, str]) -> bool:
        """Whether the row contains these values."""
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
    """Whether no two of these values exclude each other."""
    return not any(refusal.concerns(row) for refusal in REFUSALS.values())


def wanted(options: Mapping[str, tuple[str, ...]], *, triples: bool) -> Iterator[Values]:
    """All allowed pairs of values, and optionally all triples of options that affect an iteration."""
    yield from meetings(options, 2, is_allowed)
    if triples:
        yield from meetings({name: values for name, values in options.items() if name in IN_ITERATION}, 3, is_allowed)


def table(api: str, seed: int = 0, *, triples: bool = False, **fixed: str) -> list[Row]:
    """Rows that contain all `wanted` combinations; the options in ``fixed`` have the same value in each row."""
    options = {name: (fixed[name],) if name in fixed else values for name, values in OPTIONS[api].items()}
    return covering(options, wanted(options, triples=triples), is_allowed, seed)


def plain(api: str) -> Row:
    """The row with the default of every option."""
    return {name: values[0] for name, values in OPTIONS[api].items()}


def line_of(row: Row, api: str) -> str:
    """The row, and the command that replays it."""
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in row.items())
    return f"{api} {words}: {replay_line(description_of(row, api))}"


def description_of(row: Mapping[str, str], api: str, seed: int = 0) -> Description:
    """The training run of a row."""
    num_ranks = int(row["ranks"])
    return Description(
        model=_model(row["frozen"], "" if row["checkpoint"] == "none" else row["checkpoint"]),
        num_ranks=num_ranks,
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
        micro_batches={"none": (True,), "without sync": (False, True), "with sync": (True, True)}[row["accumulation"]],
        momentum=row["optimizer"] == "momentum",
        adam=row["optimizer"] == "adam",
        hook="" if row["hook"] == "none" else row["hook"],
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
