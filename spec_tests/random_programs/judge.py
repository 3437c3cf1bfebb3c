"""Sends programs to the ranks, and reduces a failing one.

A batch of programs is one task of the pool. If ranks hang or die in it, its programs run again one by one. For a
failing program, all simpler neighbours are tried: half of its calls, one call less, one node less, a node in place of
its parent, an option at its default. As long as a neighbour fails in the same way, it replaces the program. The result
is a failure from which nothing can be removed, and the command line that replays it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from spec_tests.harness import pool
from spec_tests.random_programs import player
from spec_tests.random_programs.description import Description, Node, legal, to_json

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
        ended: whether it ended early on some rank, because ranks had made different calls and got an error.
    """

    program: Description
    found: str | None
    log: tuple[str, ...] = ()
    ended: bool = False


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
        ended = any(result["ended"] for result in results)
        verdicts.append(Verdict(program, "\n".join(said) or None, tuple(results[0]["log"]), ended))
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
    return f"{found}\n\nTo see it again:\n{replay_line(small, is_simulated=judge is not judged)}"


def replay_line(program: Description, *, is_simulated: bool = False) -> str:
    """The command that runs the program again."""
    device = "--device simulated " if is_simulated else ""
    return f"python -m spec_tests.random_programs {device}{shlex.quote(to_json(program))}"


def kind_of(found: str) -> str:
    """The first words of a finding, which identify its kind."""
    line = next(line for line in found.splitlines() if not line.startswith("---"))
    return line.partition(":")[0]


def counted(verdicts: list[Verdict]) -> Counter[str]:
    """The number of calls by result."""
    return Counter(said.partition(": ")[2] for verdict in verdicts for said in verdict.log)


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
    for candidate in _steps(program):
        candidate = legal(candidate)
        shorter = to_json(candidate)
        if shorter not in seen and len(shorter) < len(text):
            seen.add(shorter)
            yield candidate


def _steps(d: Description) -> Iterator[Description]:
    half = len(d.calls) // 2
    if half > 1:
        yield replace(d, calls=d.calls[half:])
        yield replace(d, calls=d.calls[:half])
    for number in reversed(range(len(d.calls))):
        yield replace(d, calls=d.calls[:number] + d.calls[number + 1 :])
    for model in _smaller_nodes(d.model):
        yield replace(d, model=model)
    blank = Description()
    # A program of calls has no training loop.
    kept = ("model", "api", "calls", "steps") if d.steps == 0 else ("model", "api", "calls")
    for field in dataclasses.fields(Description):
        if field.name not in kept and getattr(d, field.name) != getattr(blank, field.name):
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
