"""The evaluation of measurements by the benchmarks. The benchmarks themselves are not run by the test command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spec_tests.harness import ranks
from spec_tools.benchmarks import closed_form, figures, page, report
from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.race import Entrant, Lap, Outcome, Times
from spec_tools.benchmarks.workloads import WORKLOADS

MIB = 2**20


def outcome(contender: str, seconds: list[float]) -> Outcome:
    return Outcome(
        contender,
        0.0,
        [Lap(Times(), Times(wall, wall / 2, wall), Times()) for wall in seconds],
        calls=100,
        asked=5 * MIB,
        inside=3 * MIB,
        wired=6 * MIB,
        between_steps=7 * MIB,
        computing=8 * MIB,
        peak=9 * MIB,
        priced_computing=10 * MIB if contender.startswith("minifsdp") else 0,
        priced=9 * MIB if contender.startswith("minifsdp") else 0,
        curve=[(0.0, 7 * MIB), (0.33333, 9 * MIB), (1.0, 7 * MIB)],
    )


OUTCOMES = [
    outcome("single", [0.1, 0.1, 0.1]),
    outcome("torch FSDP1 flat", [1.0, 1.0, 2.0]),
    outcome("minifsdp flat", [0.8, 0.7, 1.5]),
]


def cells(workload: str) -> dict[str, str]:
    """The last line of the table, by column name."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.table(workload, OUTCOMES)]
    return dict(zip(lines[0], lines[-1], strict=True))


def test_table_shows_bytes_per_link_for_hybrid() -> None:
    hybrid = cells("gpt-hybrid")
    assert (hybrid["MiB asked"], hybrid["MiB inside"], hybrid["MiB between"]) == ("5.00", "3.00", "2.00")
    assert (hybrid["MiB wired"], hybrid["rest MiB"]) == ("6.00", "7.00")
    assert cells("gpt").keys() == hybrid.keys() - {"MiB inside", "MiB between"}
    assert "HYBRID_SHARD, 4 ranks, 2 groups of 2" in page.sections({"gpt-hybrid": OUTCOMES})[0]


def test_table_shows_ratio_of_measured_to_calculated_memory() -> None:
    gpt = cells("gpt")
    assert (gpt["compute MiB"], gpt["peak MiB"]) == ("8.00 (0.80)", "9.00 (1.00)")
    assert "| 9.00 |" in " ".join(report.table("gpt", OUTCOMES)[2].split())


def test_step_time_is_split_into_compute_and_waits() -> None:
    lines = report.where_the_time_goes({"gpt": OUTCOMES, "wide": OUTCOMES})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == [
        "workload",
        "contender",
        "forward",
        "waits",
        "backward",
        "waits",
        "optimizer",
        "waits",
        *rows[0][8:],
    ]
    # The thread computes in half of 0.8 seconds, and the others compute in the other half.
    assert rows[-1] == ["`gpt`", "minifsdp flat", "0.0", "0.0", "800.0", "400.0", "0.0", "0.0", "400.0"]
    assert [row[1] for row in rows[2:]] == [outcome.contender for outcome in OUTCOMES]
    assert report.where_the_time_goes({"wide": OUTCOMES}) == []


def test_times_of_a_lap_are_sums_over_the_parts_of_a_step() -> None:
    lap = Lap(Times(1.0, 0.5, 0.75), Times(2.0, 1.0, 1.5), Times(4.0, 3.0, 3.5))
    assert (lap.whole, lap.wall) == (Times(7.0, 4.5, 5.75), 7.0)


def test_activations_equal_the_memory_that_a_forward_of_the_plain_model_keeps_for_each_unit() -> None:
    workload = WORKLOADS["tiny"]
    # There are no activations before the first layer. Each layer has its output, eight rows of 32 numbers. The loss
    # needs as much memory as the tensor that it averages.
    assert closed_form.activations(workload, workload.batches(0, 0)[0]) == [0, *(49 * [8 * 32 * 4])]
    # In bfloat16 they need half as much, except for the scores and the results from them, which are float32.
    gpt, low = WORKLOADS["gpt"], WORKLOADS["gpt-bf16"]
    full, half = (closed_form.activations(one, one.batches(0, 0)[0]) for one in (gpt, low))
    assert len(full) == len(half) == 10
    assert 0.5 < sum(half[:-1]) / sum(full[:-1]) < 0.55


@ranks(2)
@pytest.mark.cpu
def test_calculator_gets_the_benchmarked_step() -> None:
    for name, num in (("tiny", 1), ("tiny", 4)):
        workload = replace(WORKLOADS[name], accumulate=num)
        contender = next(one for one in CONTENDERS if one.name == "minifsdp flat")
        model = contender.take(workload.model(), workload).model
        found = closed_form.cost_of(model, workload, workload.batches(0, 0))
        unit = 4 * (32 * 32 + 32)
        assert found.stored == 3 * 48 * unit / 2
        # The optimizer also needs a gradient and an intermediate result.
        assert found.peak_optimizer == found.stored + 2 * 48 * unit / 2
        waiting = 48 * unit if num > 1 else 0
        assert found.peak_forward == found.stored + waiting + unit + 48 * 8 * 32 * 4


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
    # Two all-gathers and a reduce-scatter in a group of two, then an all-reduce of this rank's half.
    assert asked["minifsdp flat"] == asked["minifsdp FSDP2"] == (3 * whole // 2, whole // 2)
    assert asked["DDP"] == (0, 2 * whole * 3 // 4)


def test_plot_keeps_maximum_of_each_step_part() -> None:
    moments = [(1000 + number, number % 7) for number in range(10_001)]
    moments[5_000] = (6_000, 99)
    kept = figures.highest_of_each_part(moments)
    assert len(kept) <= figures.NUM_PARTS + 1
    assert max(kept, key=lambda point: point[1]) == (0.5, 99)
    assert [value for _, value in kept].count(6) >= figures.NUM_PARTS - 1
    assert figures.highest_of_each_part([(5, 1)]) == [(0.0, 1)]


def test_page_and_data_of_its_pictures_are_recorded_together(tmp_path: Path) -> None:
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
    # These are long, and recorded for one workload only.
    assert record.keys() == {"circumstances", "ratios", "parts", "memory"}
    assert record["parts"]["tiny"]["minifsdp flat"]["backward"] == {"wall": 800.0, "waits": 400.0, "others": 400.0}


def test_redundant_or_missing_contenders_are_skipped() -> None:
    by_name = {contender.name: contender for contender in CONTENDERS}
    takes_part = {name: by_name["DDP + ZeRO"].runs(workload) for name, workload in WORKLOADS.items()}
    assert [name for name, takes in takes_part.items() if not takes] == [
        "tiny-grad-op",
        "gpt-grad-op",
        "gpt-no-shard",
        "gpt-accumulate-4-grad-op",
        "gpt-prefetch",
        "wide-grad-op",
        "wide-no-prefetch",
    ]
    by_name_takes = {name for name in by_name if by_name[name].runs(WORKLOADS["wide-no-prefetch"])}
    assert by_name_takes == {"single", "DDP", *(name for name in by_name if name.endswith(("flat", "orig")))}
    assert not any(by_name["torch FSDP2"].runs(WORKLOADS[name]) for name in ("gpt-no-shard",))
    assert all(contender.runs(WORKLOADS["gpt-hybrid"]) for contender in CONTENDERS if contender.shards)
