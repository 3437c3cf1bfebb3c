"""A badge claims no more than the tests have shown."""

from __future__ import annotations

import re

import pytest

from docs_build.recording.results import BACKENDS, SpecRow

# How to observe a requirement; the kind of evidence on the CPU, on the simulated accelerator and on CUDA; its badges.
SHOWN = [
    ("[any]", ("behaviour", "", ""), ["proven: proven CPU", "open: never run CUDA"]),
    ("[cuda] ; CPU: order", ("behaviour", "", ""), ["part: in part CPU", "open: never run CUDA"]),
    (
        "[cuda] ; CPU: none",
        ("order only", "behaviour", ""),
        ["part: order only CPU", "simulated: proven simulated", "open: never run CUDA"],
    ),
    ("docs text check", ("text", "", ""), ["part: text only CPU", "open: never run CUDA"]),
    ("[any]", ("arithmetic", "", ""), ["part: arithmetic only CPU", "open: never run CUDA"]),
    ("[cuda]", ("", "", "behaviour"), ["open: open CPU", "proven: proven CUDA"]),
]


@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize(("how", "proofs", "expected"), SHOWN)
def test_only_behaviour_that_was_tested_completely_is_green(
    how: str, proofs: tuple[str, ...], expected: list[str]
) -> None:
    from docs_build.pages.badges import badges

    kinds = {backend: kind for backend, kind in zip(BACKENDS, proofs, strict=True) if kind}
    verdicts = {backend: "proven" if backend in kinds else "unproven" for backend in BACKENDS}
    row = SpecRow("X-01", "X: some", ["It works.", how, "proj"], verdicts, kinds)
    shown = re.findall(r'"badge ([a-z]+)">(.*?)<i>(.*?)</i>', badges(row))
    assert [f"{tone}: {words} {where}" for tone, words, where in shown] == expected
