"""The plots that show how costs grow with the number of units, ranks and so on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.needs("mkdocs")


def test_page_draws_every_recorded_axis_and_the_large_model() -> None:
    from docs_build.drawing import plots
    from docs_build.pages import directives
    from docs_build.pages.raw import put_back
    from docs_build.reading.order import ROOT

    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\{\{ growth (\w+) (\w+) ", page, re.MULTILINE)
    assert {axis for _, axis in shown} == set(plots.AXES)
    assert {cost for cost, _ in shown} == set(plots.COSTS)
    built = put_back(directives.expand(page, "benchmarks.html"))
    # A measurement that is newer than the record is not drawn yet.
    drawn = [(cost, axis) for cost, axis in shown if plots.growth(f"{cost} {axis}", "")]
    assert {("overhead", axis) for axis in plots.AXES} >= set(shown) - set(drawn)
    assert built.count('class="plot growth"') == len(drawn)
    assert len(re.findall(r"^\| (?:torch|minifsdp) \S+(?: \S+)? \| [\d.]+ \| 401\.6 \|", built, re.MULTILINE)) == 6


def test_the_readme_the_page_and_the_tests_count_the_same_calls() -> None:
    from docs_build.pages import costs, values
    from docs_build.reading.order import ROOT

    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    gpt = page.partition("### `gpt`:")[2].partition("### ")[0]
    rows = [line for line in gpt.splitlines() if line.startswith(("| torch", "| minifsdp"))]
    counted = [[cell.strip() for cell in line.split("|")] for line in rows]
    in_gpt = {
        library: [float(cells[6]) for cells in counted if cells[1].split()[:1] == [library]]
        for library in ("torch", "minifsdp")
    }
    in_a_small_unit = {
        library: [float(number) for number in costs.calls(library).split(" to ")] for library in ("torch", "minifsdp")
    }
    assert {values.VALUES["calls-torch"](), values.VALUES["calls-minifsdp"]()} == set(map(costs.calls, in_gpt))

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    about = r"about (\d+) to (\d+)"
    lines = re.findall(rf"^\| {about} (?:Python calls )?for .*? \| {about} \|", readme, re.MULTILINE)
    for said, figures in zip(lines, (in_a_small_unit, in_gpt), strict=True):
        torchs, ours = [float(number) for number in said[:2]], [float(number) for number in said[2:]]
        for (low, high), found in ((torchs, figures["torch"]), (ours, figures["minifsdp"])):
            # "About" means within 5 %.
            assert low == pytest.approx(min(found), rel=0.05)
            assert high == pytest.approx(max(found), rel=0.05)


def test_record_counts_the_calls_of_the_current_engine() -> None:
    from docs_build.recording import records
    from spec_tests.costs.count_growth import OURS, UNITS
    from spec_tests.costs.test_growth import counted

    record = records.load("growth")
    # Another version of torch may make slightly more or fewer calls.
    apart = 0.01 if f"torch {torch.__version__}" in record["circumstances"][-1] else 0.05
    for name in OURS:
        today = dict(zip(UNITS, counted(2)[name]["units"], strict=True))
        for units, point in zip(record["axes"]["units"], record["units"][name], strict=True):
            if units in today:
                assert point["calls"] == pytest.approx(today[units] / units, rel=apart), (
                    f"{name}, {units} units: the engine has changed: python -m spec_tools.benchmarks.growth --calls"
                )


def test_page_text_is_computed_from_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build.pages import costs
    from docs_build.recording import records

    points = [{"calls": number, "overhead": 90.0} for number in (100.0, 10.0)]
    axes = {"units": [12, 48], "ranks": [2, 1024], "parameters": [1, 64]}
    record = {axis: {"torch FSDP2": points, "minifsdp FSDP2": points} for axis in axes}
    monkeypatch.setattr(records, "DATA", tmp_path)
    (tmp_path / "growth.json").write_text(json.dumps({"axes": axes, **record}))
    assert costs.calls("minifsdp") == "10 to 10"
    assert costs.overhead("torch") == costs.overhead("minifsdp") == "90"
    assert costs.calls_by_ranks("torch FSDP2") == "100 to 10"
    assert costs.calls_for_a_parameter("torch FSDP2") == f"{-90 / 63:.0f}"
