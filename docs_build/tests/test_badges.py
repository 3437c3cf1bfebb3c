"""A badge claims no more than the tests have shown."""

from __future__ import annotations

import re

import pytest

from docs_build.recording import results
from docs_build.recording.results import BACKENDS, SpecRow
from spec_tests.harness.accounting import rows_of_accelerators

pytestmark = pytest.mark.needs("mkdocs")

CUDA = BACKENDS[2]
NEVER = ("open", "never run", "CUDA")
# How to observe a requirement; the kind of evidence on the CPU, on the simulated accelerator and on CUDA; its badges.
SHOWN = [
    ("[any]", ("behaviour", "", ""), [("proven", "proven", "CPU"), NEVER]),
    ("[cuda] ; CPU: order", ("behaviour", "", ""), [("part", "in part", "CPU"), NEVER]),
    (
        "[cuda] ; CPU: none",
        ("order only", "behaviour", ""),
        [("part", "order only", "CPU"), ("simulated", "proven", "simulated"), NEVER],
    ),
    ("docs text check", ("text", "", ""), [("part", "text only", "CPU"), NEVER]),
    ("[any]", ("arithmetic", "", ""), [("part", "arithmetic only", "CPU"), NEVER]),
    ("[cuda]", ("", "", "behaviour"), [("open", "open", "CPU"), ("proven", "proven", "CUDA")]),
]
TAGS = [
    ("[any]", ("behaviour", "", ""), {"proven", "open-on-nccl"}),
    ("[cuda]", ("behaviour", "", ""), {"in-part", "open-on-nccl"}),
    ("[cuda]", ("text", "behaviour", ""), {"in-part", "open-on-nccl", "simulated"}),
    ("[cuda]", ("", "", "behaviour"), {"proven"}),
    ("text", ("text", "", ""), {"text-only", "open-on-nccl"}),
    ("[any]", ("", "", ""), {"unproven", "open-on-nccl"}),
]


def row(how: str, proofs: tuple[str, ...]) -> SpecRow:
    """A requirement with recorded results."""
    kinds = {backend: kind for backend, kind in zip(BACKENDS, proofs, strict=True) if kind}
    verdicts = {backend: "proven" if backend in kinds else "unproven" for backend in BACKENDS}
    return SpecRow("X-01", "X: some", ["It works.", how, "proj"], verdicts, kinds)


@pytest.mark.parametrize(("how", "proofs", "expected"), SHOWN)
def test_only_behaviour_that_was_tested_completely_is_green(
    how: str, proofs: tuple[str, ...], expected: list[tuple[str, str, str]]
) -> None:
    from docs_build.pages.badges import badges

    assert re.findall(r'"badge ([a-z]+)">(.*?)<i>(.*?)</i>', badges(row(how, proofs))) == expected


@pytest.mark.parametrize(("how", "proofs", "expected"), TAGS)
def test_filters_match_requirement_results(how: str, proofs: tuple[str, ...], expected: set[str]) -> None:
    from docs_build.pages.badges import FILTERS, tags

    assert set(tags(row(how, proofs))) == expected <= FILTERS.keys()


def test_cuda_requirements_are_those_of_the_tests_and_are_not_green_without_cuda_run() -> None:
    from docs_build.pages.badges import badges

    rows = [one for one in results.all_rows().values() if one.needs_cuda]
    assert {one.id for one in rows} == {one for one in rows_of_accelerators() if one[:4] != "SIM-"}
    assert [one.id for one in rows if one.results[CUDA] != "proven" and '"badge proven"' in badges(one)] == []
