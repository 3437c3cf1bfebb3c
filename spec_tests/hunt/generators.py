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
from spec_tests.hunt import scenarios
from spec_tests.properties.description import Description, from_json, to_json
from spec_tests.properties.draw import drawn, resuming
from spec_tests.properties.hunt import findings_of, first_failure, simplest
from spec_tests.streams import scenario

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


def _runs(api: str, seed: int) -> list[str]:
    return [to_json(d) for d in drawn(BATCH, seed, _num_ranks(seed), api)]


def _resuming(api: str, seed: int) -> list[str]:
    return [to_json(d) for d in resuming(BATCH, seed, _num_ranks(seed), api)]


def _combinations(api: str, seed: int) -> list[str]:
    return [to_json(description_of(row, api, seed)) for row in table(api, seed)]


def _scenarios(api: str, seed: int) -> list[str]:
    shape = random.Random(seed).choice(list(scenario.SHAPES))
    return [scenario.to_json(s) for s in scenario.drawn(SMALL_BATCH, seed, shape, api)]


def _num_ranks(seed: int) -> int:
    # Two ranks are most likely, because the comparison is bitwise there.
    return random.Random(seed).choice([1, 2, 2, 2, 3, 4])


def _try(texts: list[str]) -> list[str | None]:
    """Trains the descriptions; those with the same number of ranks run together."""
    descriptions = [from_json(text) for text in texts]
    found: dict[Description, str | None] = {}
    for num_ranks in sorted({d.num_ranks for d in descriptions}):
        together = [d for d in descriptions if d.num_ranks == num_ranks]
        found.update(zip(together, findings_of(together), strict=True))
    return [found[d] for d in descriptions]


def _simplest(text: str) -> str:
    end = time.monotonic() + LONGEST

    def failing(candidates: list[Description]) -> Description | None:
        return first_failure(candidates) if time.monotonic() < end else None

    return to_json(simplest(from_json(text), failing))


GENERATORS = {
    f"{name}-{api}": Generator(functools.partial(draw, api), findings, smaller)
    for name, draw, findings, smaller in (
        ("runs", _runs, _try, _simplest),
        ("resumed", _resuming, _try, _simplest),
        ("combinations", _combinations, _try, _simplest),
        ("scenarios", _scenarios, scenarios.findings_of, scenarios.simplest_of),
    )
    for api in ("fsdp1", "fully_shard")
}
