"""The generators: functions that draw, try and reduce cases.

A case is a line of JSON, so the hunt does not depend on the kind of case.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from spec_tests.combinations.table import description_of, table
from spec_tests.random_programs.description import Description, from_json, to_json
from spec_tests.random_programs.draw import SHAPES, drawn
from spec_tests.random_programs.judge import first_failure, judged, simplest
from spec_tools.hunt import scenarios

__all__ = ["GENERATORS", "Generator"]

BATCH = 25
SMALL_BATCH = 10  # scenarios; each is played in several orders
LONGEST = 120.0  # seconds for reducing a case


@dataclass(frozen=True)
class Generator:
    """One kind of case.

    Attributes:
        draw: returns some cases, the same ones for the same seed.
        findings: returns a description of the failure for each case, or ``None``.
        simplest: reduces a case until no part can be removed.
    """

    draw: Callable[[int], list[str]]
    findings: Callable[[list[str]], list[str | None]]
    simplest: Callable[[str], str]


def _programs(kind: str, api: str, seed: int) -> list[str]:
    # Two ranks are most likely, because the comparison is bitwise there.
    shape = random.Random(seed).choice(["1", "2", "2", "2", "3", "4"])
    return [to_json(d) for d in drawn(kind, BATCH, seed, api, shape)]


def _combinations(kind: str, api: str, seed: int) -> list[str]:
    return [to_json(description_of(row, api, seed)) for row in table(api, seed)]


def _races(kind: str, api: str, seed: int) -> list[str]:
    shape = random.Random(seed).choice(list(SHAPES))
    return [to_json(d) for d in drawn(kind, SMALL_BATCH, seed, api, shape)]


def _try(texts: list[str]) -> list[str | None]:
    """Runs the programs; those with the same number of ranks, and with equal calls on all ranks, run together."""
    programs = [from_json(text) for text in texts]
    found: dict[str, str | None] = {}
    for kind in sorted({(d.num_ranks, d.is_apart) for d in programs}):
        together = [d for d in programs if (d.num_ranks, d.is_apart) == kind]
        found.update({to_json(verdict.program): verdict.found for verdict in judged(together)})
    return [found[to_json(d)] for d in programs]


def _simplest(text: str) -> str:
    end = time.monotonic() + LONGEST

    def failing(candidates: list[Description]) -> Description | None:
        return first_failure(candidates) if time.monotonic() < end else None

    return to_json(simplest(from_json(text), failing))


GENERATORS = {
    f"{name}-{api}": Generator(functools.partial(draw, kind, api), findings, smaller)
    for name, kind, draw, findings, smaller in (
        ("runs", "loops", _programs, _try, _simplest),
        ("resumed", "resumed", _programs, _try, _simplest),
        ("combinations", "", _combinations, _try, _simplest),
        ("calls", "calls", _programs, _try, _simplest),
        ("apart", "apart", _programs, _try, _simplest),
        ("scenarios", "races", _races, scenarios.findings_of, scenarios.simplest_of),
    )
    for api in ("fsdp1", "fully_shard")
}
