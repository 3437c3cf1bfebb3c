"""Sends descriptions to the ranks, and reduces a failing one.

A batch of descriptions is one task of the pool. If it fails, its descriptions are tried one by one. For the first that
fails, all simpler neighbours are tried: one node less, a node in place of its parent, an option at its default. As long
as a neighbour fails, it replaces the description. The result is a failure from which nothing can be removed, and the
command line that replays it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from spec_tests.harness import pool
from spec_tests.properties import run
from spec_tests.properties.description import Description, Node, legal, to_json

__all__ = ["failure_of", "first_failure", "hunt", "replay_line", "report", "simplest"]

BATCH = 25
SMALL_BATCH = 8  # during reduction: usually one of the first few fails
LIMIT = 30.0  # seconds until a description counts as hanging

Findings = list[str | None]


def hunt(descriptions: list[Description]) -> str | None:
    """Trains all descriptions, which must have the same number of ranks.

    Returns:
        The first failure, reduced as far as possible, with the command that replays it; ``None`` if there is none.
    """
    found = first_failure(descriptions, BATCH)
    return None if found is None else report(simplest(found))


def first_failure(descriptions: list[Description], batch_size: int = SMALL_BATCH) -> Description | None:
    """The first description that fails."""
    for start in range(0, len(descriptions), batch_size):
        batch = descriptions[start : start + batch_size]
        findings = findings_of(batch)
        for description, finding in zip(batch, findings, strict=True):
            if finding is not None:
                return description
    return None


def findings_of(descriptions: list[Description]) -> Findings:
    """The findings of the ranks for each description, or ``None``; one task of the pool unless a description hangs."""
    try:
        return _errand(descriptions, LIMIT * (1 + len(descriptions) / BATCH))
    except pool.Failure as failure:
        if len(descriptions) == 1:
            return [str(failure)]
    return [finding for description in descriptions for finding in findings_of([description])]


def _errand(descriptions: list[Description], limit: float) -> Findings:
    texts = [to_json(description) for description in descriptions]
    num_ranks = descriptions[0].num_ranks
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"texts": texts, "folder": folder}
        pool.run(num_ranks, run.__name__, run.train_all.__name__, arguments, limit)
        by_rank = [json.loads(pathlib.Path(folder, str(rank)).read_text()) for rank in range(num_ranks)]
    return [_joined(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def _joined(of_ranks: tuple[str | None, ...]) -> str | None:
    said = [f"--- rank {rank} ---\n{text}" for rank, text in enumerate(of_ranks) if text]
    return "\n".join(said) or None


def failure_of(description: Description) -> str | None:
    """The findings of the ranks for this description; ``None`` if there are none."""
    return findings_of([description])[0]


def replay_line(description: Description) -> str:
    """The command that runs the description again."""
    return f"python -m spec_tests.properties.replay {shlex.quote(to_json(description))}"


def report(description: Description) -> str:
    """The report of a failing description."""
    return f"{failure_of(description)}\n\nTo see it again:\n{replay_line(description)}"


# --- reduction ---


def simplest(
    description: Description, failing: Callable[[list[Description]], Description | None] = first_failure
) -> Description:
    """Reduces a failing description until no part can be removed.

    Args:
        description: a failing one.
        failing: returns the first one of several that fails.
    """
    while True:
        simpler = by_ranks(neighbours(description), failing)
        if simpler is None:
            return description
        description = simpler


def by_ranks(
    candidates: Iterable[Description], failing: Callable[[list[Description]], Description | None]
) -> Description | None:
    """The first failing candidate; candidates with the same number of ranks are tried together."""
    for _, together in itertools.groupby(candidates, key=lambda d: d.num_ranks):
        found = failing(list(together))
        if found is not None:
            return found
    return None


def neighbours(description: Description) -> Iterator[Description]:
    """All descriptions that are one step simpler, largest steps first; all are legal and different."""
    seen = {description}
    for candidate in _steps(description):
        candidate = legal(candidate)
        if candidate not in seen and _weight(candidate) < _weight(description):
            seen.add(candidate)
            yield candidate


def _weight(description: Description) -> int:
    # Two descriptions can be neighbours of each other. A decreasing weight makes the reduction terminate.
    return len(to_json(description))


def _steps(d: Description) -> Iterator[Description]:
    for model in _smaller_nodes(d.model):
        yield replace(d, model=model)
    blank = Description()
    for field in dataclasses.fields(Description):
        if field.name not in ("model", "api") and getattr(d, field.name) != getattr(blank, field.name):
            yield replace(d, **{field.name: getattr(blank, field.name)})
    for i in range(len(d.micro_batches) - 1):
        yield replace(d, micro_batches=d.micro_batches[:i] + d.micro_batches[i + 1 :])
    for i in range(len(d.ties)):
        yield replace(d, ties=d.ties[:i] + d.ties[i + 1 :])
    for field, low in (("steps", 1), ("samples", 1), ("width", 1)):
        if getattr(d, field) > low:
            yield replace(d, **{field: getattr(d, field) - 1})


def _smaller_nodes(node: Node) -> Iterator[Node]:
    for i, child in enumerate(node.children):
        yield replace(node, children=node.children[:i] + node.children[i + 1 :])
        if child.children:
            yield replace(node, children=node.children[:i] + child.children + node.children[i + 1 :])
    for i, child in enumerate(node.children):
        for smaller in _smaller_nodes(child):
            yield replace(node, children=(*node.children[:i], smaller, *node.children[i + 1 :]))
    blank = Node()
    for field in dataclasses.fields(Node):
        if field.name not in ("children", "kind") and getattr(node, field.name) != getattr(blank, field.name):
            yield replace(node, **{field.name: getattr(blank, field.name)})
