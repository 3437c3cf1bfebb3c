"""Sends programs to the ranks, and reduces a failing one.

A batch of programs is one task of the pool. If ranks hang or die in it, its programs run again one by one. For a
failing program, all simpler neighbours are tried: half of its calls, one call less, one node less, a node in place of
its parent, an option at its default. As long as a neighbour fails in the same way, it replaces the program. The result
is a failure from which nothing can be removed, and the command line that replays it.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spec_tests.harness import pool
from spec_tests.random_programs import player
from spec_tests.random_programs.description import Description, from_json, legal, to_json

BATCH = 25
SMALL_BATCH = 8  # during reduction: usually one of the first few fails
LIMIT = 30.0  # seconds until a program counts as hanging; the first program also imports modules
LONGEST = 60.0  # seconds for reducing a program


@dataclass(frozen=True)
class Verdict:
    """The result of a program.

    Attributes:
        program: the program.
        found: the finding, or ``None``.
        log: the result of each call on rank 0.
    """

    program: Description
    found: str | None
    log: tuple[str, ...] = ()


# Runs programs, and yields a verdict for each.
Judge = Callable[[list[Description]], Iterator[Verdict]]
# Returns the first of several programs that fails.
Failing = Callable[[list[Description]], Description | None]


def judged(programs: list[Description], batch_size: int = BATCH) -> Iterator[Verdict]:
    """Runs the programs, and yields a verdict for each. A batch has programs with the same number of ranks."""
    for _, alike in itertools.groupby(programs, key=lambda d: d.num_ranks):
        together = list(alike)
        for start in range(0, len(together), batch_size):
            yield from _judged(together[start : start + batch_size])


def _judged(programs: list[Description]) -> list[Verdict]:
    try:
        return _errand(programs, LIMIT * (1 + len(programs) / 8 if len(programs) > 1 else 1))
    except pool.Failure as failure:
        if len(programs) == 1:
            return [Verdict(programs[0], f"hang or crash: {failure}")]
    return [verdict for program in programs for verdict in _judged([program])]


def _errand(programs: list[Description], limit: float) -> list[Verdict]:
    num_ranks = programs[0].num_ranks
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"texts": [to_json(program) for program in programs], "folder": folder}
        pool.run(num_ranks, player.__name__, player.play_all.__name__, arguments, limit)
        by_rank = [json.loads(pathlib.Path(folder, str(rank)).read_text()) for rank in range(num_ranks)]
    verdicts = []
    for program, *results in zip(programs, *by_rank, strict=True):
        said = [f"--- rank {rank} ---\n{result['found']}" for rank, result in enumerate(results) if result["found"]]
        verdicts.append(Verdict(program, "\n".join(said) or None, tuple(results[0]["log"])))
    return verdicts


def failure_of(programs: list[Description], judge: Judge = judged) -> str | None:
    """Runs the programs until one fails.

    Returns:
        The failure, reduced as far as possible, with the command that replays it; ``None`` if no program fails.
    """
    first = next((verdict for verdict in judge(programs) if verdict.found), None)
    if first is None:
        return None
    kind, end = kind_of(first.found), time.monotonic() + LONGEST

    def failing(candidates: list[Description]) -> Description | None:
        for start in range(0, len(candidates), SMALL_BATCH):
            if time.monotonic() > end:
                return None
            for verdict in judge(candidates[start : start + SMALL_BATCH]):
                if verdict.found and kind_of(verdict.found) == kind:
                    return verdict.program
        return None

    small = simplest(first.program, failing)
    (again,) = judge([small])
    found = again.found or f"Not seen again; at first:\n{first.found}"
    device = "" if judge is judged else "--device simulated "
    command = f"python -m spec_tests.random_programs {device}{shlex.quote(to_json(small))}"
    return f"{found}\n\nTo see it again:\n{command}"


def kind_of(found: str) -> str:
    """The first words of a finding, which identify its kind."""
    line = next(line for line in found.splitlines() if not line.startswith("---"))
    return line.partition(":")[0]


# --- reduction ---


def simplest(program: Description, failing: Failing) -> Description:
    """Reduces a failing program until no part can be removed. ``failing`` returns the first of several that fails."""
    while (simpler := failing(list(neighbours(program)))) is not None:
        program = simpler
    return program


def neighbours(program: Description) -> Iterator[Description]:
    """All programs that are one step simpler, largest steps first; all are legal and different."""
    # Two programs can be neighbours of each other. A decreasing length makes the reduction terminate.
    text = to_json(program)
    seen = {text}
    for fields in _steps(json.loads(text)):
        candidate = legal(from_json(json.dumps(fields)))
        shorter = to_json(candidate)
        if shorter not in seen and len(shorter) < len(text):
            seen.add(shorter)
            yield candidate


def _steps(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON form of a program or of a module, with less in it."""
    half = len(fields.get("calls", ())) // 2
    if half:
        yield {**fields, "calls": fields["calls"][half:]}
        yield {**fields, "calls": fields["calls"][:half]}
    for name, value in fields.items():
        if isinstance(value, list):
            for i in reversed(range(len(value))):
                yield {**fields, name: value[:i] + value[i + 1 :]}
    if "model" in fields:
        for model in _steps(fields["model"]):
            yield {**fields, "model": model}
    for name, value in fields.items():
        # A program of calls has no training loop.
        if name not in ("model", "children", "kind", "api") and (name, value) != ("steps", 0):
            yield {other: fields[other] for other in fields if other != name}
        if isinstance(value, int) and value > 1:
            yield {**fields, name: value - 1}
    children = fields.get("children", [])
    for i, child in enumerate(children):
        before, after = children[:i], children[i + 1 :]
        if "children" in child:
            yield {**fields, "children": before + child["children"] + after}
        for smaller in _steps(child):
            yield {**fields, "children": [*before, smaller, *after]}
