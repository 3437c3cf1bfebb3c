"""A badge claims no more than the tests have shown."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.needs("mkdocs")

CPU, SIMULATED, CUDA = "cpu-gloo", "simulated", "cuda-nccl"


def row(how_to_observe: str, **proofs: str):  # type: ignore[no-untyped-def]
    """A requirement with recorded results, for example ``cpu="text"``."""
    from docs_build.recording.results import SpecRow

    backends = {"cpu": CPU, "simulated": SIMULATED, "cuda": CUDA}
    kinds = {backends[name]: kind for name, kind in proofs.items()}
    results = {backend: "proven" if backend in kinds else "unproven" for backend in backends.values()}
    return SpecRow("X-01", "X: some", ["It works.", how_to_observe, "proj"], results, kinds)


def shown(one) -> list[tuple[str, str, str]]:  # type: ignore[no-untyped-def]
    """Tone, text and backend of each badge."""
    from docs_build.pages.badges import badges

    return re.findall(r'"badge ([a-z]+)">(.*?)<i>(.*?)</i>', badges(one))


NEVER = ("open", "never run", "CUDA")


def test_cuda_requirement_is_never_green_after_cpu_run() -> None:
    assert shown(row("[any]", cpu="behaviour")) == [("proven", "proven", "CPU"), NEVER]
    assert shown(row("[cuda] ; CPU: order", cpu="behaviour")) == [("part", "in part", "CPU"), NEVER]
    assert shown(row("[any] size; [cuda] memory", cpu="behaviour"))[0] == ("part", "in part", "CPU")


def test_simulated_result_is_marked() -> None:
    both = shown(row("[cuda] ; CPU: none", cpu="order only", simulated="behaviour"))
    assert both == [("part", "order only", "CPU"), ("simulated", "proven", "simulated"), NEVER]


def test_text_or_arithmetic_proof_is_not_green() -> None:
    assert shown(row("docs text check", cpu="text"))[0] == ("part", "text only", "CPU")
    assert shown(row("[any]", cpu="arithmetic"))[0] == ("part", "arithmetic only", "CPU")


def test_cuda_run_shows_requirement_as_proven() -> None:
    assert shown(row("[cuda]", cuda="behaviour"))[1] == ("proven", "proven", "CUDA")


def test_new_requirement_shows_never_run() -> None:
    new = row("[any]")
    new.is_recorded = False
    assert shown(new) == [("open", "never run", "CPU"), NEVER]
    assert shown(row("[any]"))[0] == ("open", "open", "CPU")


def test_cuda_requirement_is_not_green_without_cuda_run() -> None:
    from docs_build.pages import badges
    from docs_build.recording import results

    rows = [one for one in results.all_rows().values() if one.needs_cuda]
    assert len(rows) > 60
    green = [one.id for one in rows if one.results[CUDA] != "proven" and '"badge proven"' in badges.badges(one)]
    assert green == []
    assert all("open-on-nccl" in badges.tags(one) for one in rows if one.results[CUDA] != "proven")


def test_cuda_requirements_equal_those_of_tests() -> None:
    from docs_build.recording import results
    from spec_tests.harness.accounting import rows_of_accelerators

    rows = results.all_rows().values()
    assert {one.id for one in rows if one.needs_cuda} == {one for one in rows_of_accelerators() if one[:4] != "SIM-"}


@pytest.mark.parametrize(
    ("how", "proofs", "expected"),
    [
        ("[any]", {"cpu": "behaviour"}, {"proven", "open-on-nccl"}),
        ("[cuda]", {"cpu": "behaviour"}, {"in-part", "open-on-nccl"}),
        ("[cuda]", {"cpu": "text", "simulated": "behaviour"}, {"in-part", "open-on-nccl", "simulated"}),
        ("[cuda]", {"cuda": "behaviour"}, {"proven"}),
        ("text", {"cpu": "text"}, {"text-only", "open-on-nccl"}),
        ("[any]", {}, {"unproven", "open-on-nccl"}),
    ],
)
def test_filters_match_requirement_results(how: str, proofs: dict[str, str], expected: set[str]) -> None:
    from docs_build.pages.badges import FILTERS, tags

    found = set(tags(row(how, **proofs)))
    assert found == expected
    assert found <= FILTERS.keys()


def test_footer_shows_backends_and_kinds_of_proof() -> None:
    from docs_build.pages.badges import where_proven

    rows = [row("[any]", cpu="behaviour"), row("[cuda]", cpu="behaviour", simulated="behaviour"), row("", cpu="text")]
    said = where_proven(rows)
    assert said == (
        "CPU, gloo: 1 proven, 1 in part, 1 text only; simulated accelerator: 1 proven; CUDA, NCCL: never run"
    )
