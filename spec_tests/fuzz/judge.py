"""Sends programs to the ranks, and shrinks a program that fails.

A batch of programs is one task of the pool. If ranks hang or die in it, its programs run again one by one. A failing
program is shrunk by removing calls and options, as long as the same kind of finding remains.
"""

from __future__ import annotations

import json
import pathlib
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spec_tests.fuzz import play
from spec_tests.fuzz.case import Case, to_json
from spec_tests.harness import pool

__all__ = ["Verdict", "judged", "kind_of", "replay_line", "simplest", "summary"]

BATCH = 20
LIMIT = 30.0  # seconds until a hanging program is ended; the first program also imports modules

DEFAULTS = {
    "strategy": "FULL_SHARD",
    "originals": False,
    "nested": False,
    "uses": 1,
    "prefetch": "pre",
    "forward_prefetch": False,
    "frees": None,
    "offload": False,
    "optimizer": "sgd",
    "mixed": False,
    "replicas": None,
    "kinds": None,
    "steps_by": None,
    "begins": "double",
    "full_in_eval": False,
    "hook": False,
}


@dataclass(frozen=True)
class Verdict:
    """The result of a program.

    Attributes:
        case: the program.
        found: what is wrong, or ``None``.
        log: the result of each call on rank 0.
        ended: whether it ended early on some rank, because ranks had made different calls and got an error.
    """

    case: Case
    found: str | None
    log: tuple[str, ...] = ()
    ended: bool = False


def judged(cases: list[Case]) -> Iterator[Verdict]:
    """Runs the programs and yields a verdict for each."""
    for start in range(0, len(cases), BATCH):
        yield from _judged(cases[start : start + BATCH])


def _judged(cases: list[Case]) -> list[Verdict]:
    try:
        return _errand(cases, LIMIT if len(cases) == 1 else 4 * LIMIT)
    except pool.Failure as failure:
        if len(cases) == 1:
            return [Verdict(cases[0], f"hang or crash: {failure}")]
    return [verdict for case in cases for verdict in _judged([case])]


def _errand(cases: list[Case], limit: float) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"texts": [to_json(case) for case in cases], "folder": folder}
        pool.run(2, play.__name__, play.play_all.__name__, arguments, limit)
        of_ranks = [json.loads(pathlib.Path(folder, str(rank)).read_text()) for rank in range(2)]
    verdicts = []
    for case, *results in zip(cases, *of_ranks, strict=True):
        said = [f"--- rank {rank} ---\n{result['found']}" for rank, result in enumerate(results) if result["found"]]
        ended = any(result["ended"] for result in results)
        verdicts.append(Verdict(case, "\n".join(said) or None, tuple(results[0]["log"]), ended))
    return verdicts


def kind_of(found: str) -> str:
    """The first words of a finding, which identify its kind."""
    line = next(line for line in found.splitlines() if not line.startswith("---"))
    return line.partition(":")[0]


def simplest(case: Case) -> Case:
    """Removes all calls and options that are not necessary for the finding."""
    first = next(judged([case])).found
    if first is None:
        return case
    kind = kind_of(first)
    while True:
        smaller = next((c for c in _smaller(case) if (f := next(judged([c])).found) and kind_of(f) == kind), None)
        if smaller is None:
            return case
        case = smaller


def _smaller(case: Case) -> Iterator[Case]:
    half = len(case.calls) // 2
    if half > 1:
        yield replace(case, calls=case.calls[half:])
        yield replace(case, calls=case.calls[:half])
    for number in reversed(range(len(case.calls))):
        yield replace(case, calls=case.calls[:number] + case.calls[number + 1 :])
    for name, value in case.options.items():
        if name in DEFAULTS and value != DEFAULTS[name]:
            yield replace(case, options={key: kept for key, kept in case.options.items() if key != name})


def replay_line(case: Case) -> str:
    """The command that reproduces the finding."""
    return f"python -m spec_tests.fuzz --replay {shlex.quote(to_json(case))}"


def counted(verdicts: list[Verdict]) -> Counter[str]:
    """The number of calls by result."""
    return Counter(said.partition(": ")[2] for verdict in verdicts for said in verdict.log)


def summary(verdicts: list[Verdict]) -> dict[str, int]:
    """For a record: the number of programs, findings, calls and refused calls."""
    said = counted(verdicts)
    options = [verdict.case.options for verdict in verdicts]
    return {
        "programs": len(verdicts),
        "findings": sum(verdict.found is not None for verdict in verdicts),
        "calls": sum(said.values()),
        "refused": sum(said.values()) - said["ok"],
        "ended early": sum(verdict.ended for verdict in verdicts),
        "hybrid": sum(each.get("replicas") is not None for each in options),
        "mixed precision": sum(bool(each.get("mixed")) for each in options),
    }
