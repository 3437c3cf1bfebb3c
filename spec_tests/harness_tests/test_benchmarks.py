"""What the benchmarks make of what was measured. They themselves are no part of the test command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spec_tests.benchmarks import figures, page, report
from spec_tests.benchmarks.contenders import CONTENDERS
from spec_tests.benchmarks.race import Entrant, Lap, Outcome
from spec_tests.benchmarks.workloads import WORKLOADS
from spec_tests.harness import ranks

MIB = 2**20


def outcome(contender: str, seconds: list[float]) -> Outcome:
    return Outcome(
        contender,
        0.0,
        [Lap(wall, wall, wall, 0.0, 0.0, 0.0) for wall in seconds],
        calls=100,
        asked=5 * MIB,
        inside=3 * MIB,
        wired=6 * MIB,
        resting=7 * MIB,
        peak=9 * MIB,
        curve=[(0.0, 7 * MIB), (0.33333, 9 * MIB), (1.0, 7 * MIB)],
    )


OUTCOMES = [
    outcome("single", [0.1, 0.1, 0.1]),
    outcome("torch FSDP1 flat", [1.0, 1.0, 2.0]),
    outcome("minifsdp flat", [0.8, 0.7, 1.5]),
]


def cells(workload: str) -> dict[str, str]:
    """The last line of the table, by the names of the columns."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.table(workload, OUTCOMES)]
    return dict(zip(lines[0], lines[-1], strict=True))


def test_what_is_asked_on_each_link_is_told_where_there_are_two() -> None:
    hybrid = cells("gpt-hybrid")
    assert (hybrid["MiB asked"], hybrid["MiB inside"], hybrid["MiB between"]) == ("5.00", "3.00", "2.00")
    assert (hybrid["MiB wired"], hybrid["rest MiB"], hybrid["peak MiB"]) == ("6.00", "7.00", "9.00")
    assert cells("gpt").keys() == hybrid.keys() - {"MiB inside", "MiB between"}
    assert "HYBRID_SHARD, 4 ranks, 2 groups of 2" in page.sections({"gpt-hybrid": OUTCOMES})[0]


@ranks(4)
@pytest.mark.cpu
def test_a_hybrid_step_shards_inside_of_a_group_and_reduces_between_groups() -> None:
    workload = replace(WORKLOADS["tiny"], strategy="HYBRID_SHARD", num_ranks=4)
    whole = 48 * 4 * (32 * 32 + 32)
    asked = {}
    for contender in CONTENDERS:
        if contender.name in ("DDP", "minifsdp flat", "minifsdp FSDP2"):
            entrant = Entrant(contender, workload)
            batches = workload.batches(0, 0)
            _, all_links, inside, _ = figures.collectives(
                lambda entrant=entrant, batches=batches: entrant.step(batches)
            )
            asked[contender.name] = inside, all_links - inside
    # Two gathers and a reduce-scatter in a group of two, then an all-reduce of the half that this rank has.
    assert asked["minifsdp flat"] == asked["minifsdp FSDP2"] == (3 * whole // 2, whole // 2)
    assert asked["DDP"] == (0, 2 * whole * 3 // 4)


def test_of_each_part_of_a_step_the_highest_moment_is_kept() -> None:
    moments = [(1000 + number, number % 7) for number in range(10_001)]
    moments[5_000] = (6_000, 99)
    kept = figures.highest_of_each_part(moments)
    assert len(kept) <= figures.NUM_PARTS + 1
    assert max(kept, key=lambda point: point[1]) == (0.5, 99)
    assert [value for _, value in kept].count(6) >= figures.NUM_PARTS - 1
    assert figures.highest_of_each_part([(5, 1)]) == [(0.0, 1)]


def test_the_page_and_what_its_pictures_are_drawn_from_are_recorded_together(tmp_path: Path) -> None:
    written, data = tmp_path / "page.md", tmp_path / "data.json"
    written.write_text(f"before\n{page.BEGIN}old\n{page.END}after\n")
    page.record({"tiny": OUTCOMES, "gpt": OUTCOMES}, 90.0, written, data)
    text, record = written.read_text(), json.loads(data.read_text())
    assert text.startswith(f"before\n{page.BEGIN}\n* recorded ")
    assert text.endswith(f"{page.END}after\n")
    assert "old" not in text
    assert all(fact in text for fact in record["circumstances"])
    assert record["ratios"]["tiny"]["minifsdp flat"] == {"low": 0.725, "median": 0.75, "high": 0.775}
    assert record["memory"]["minifsdp flat"] == [[0.0, 7.0], [0.3333, 9.0], [1.0, 7.0]]
    # Long, and of one workload only.
    assert record.keys() == {"circumstances", "ratios", "memory"}


def test_who_would_repeat_itself_or_is_not_installed_does_not_take_part() -> None:
    by_name = {contender.name: contender for contender in CONTENDERS}
    takes_part = {name: by_name["DDP + ZeRO"].runs(workload) for name, workload in WORKLOADS.items()}
    assert [name for name, takes in takes_part.items() if not takes] == [
        "tiny-grad-op",
        "gpt-grad-op",
        "gpt-no-shard",
        "gpt-prefetch",
        "wide-grad-op",
    ]
    assert not any(by_name["torch FSDP2"].runs(WORKLOADS[name]) for name in ("gpt-no-shard",))
    assert all(contender.runs(WORKLOADS["gpt-hybrid"]) for contender in CONTENDERS if contender.shards)
