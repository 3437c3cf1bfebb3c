"""The files next to the report of the GPU kit: CSV, JSON for a simulator and for pytest-benchmark, and pictures."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from spec_tools.gpu import bandwidth_table, plots, report, steps_table
from spec_tools.gpu.beside import write_beside
from spec_tools.gpu.chunks import Outcome
from spec_tools.gpu.platforms import CUDA

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("bandwidth.csv", "costs.json", "bandwidth.svg", "steps.svg", "benchmark.json")
H100 = "NVIDIA H100 80GB HBM3"


def sent(collective: str, dtype: str, ranks: int, times: dict[int, float]) -> dict[str, Any]:
    """A finding of the stage ``bandwidth``; times in microseconds by bytes."""
    rows: list[dict[str, Any]] = [
        {"what": "", "bytes": size, "count": size // 8, "memory": 2 * size, "us": [us - 1, us, us + 1], "wrong": 0}
        | {"host us": [us + 5, us + 6, us + 7], "algbw": size / us / 1000, "busbw": size / us / 2000}
        for size, us in times.items()
    ]
    rows.append({"what": "Llama 7B block", "bytes": 9 << 30, "count": 1, "memory": 9, "skipped": "needs 9 MiB"})
    about = {"collective": collective, "dtype": dtype, "ranks": ranks, "card": H100, "shared": False}
    return {**about, "outcome": "passed", "rows": rows}


def trained(contender: str, *ms: float) -> dict[str, Any]:
    """A finding of the stage ``steps``."""
    middle = sorted(ms)[len(ms) // 2]
    figures = {"ms": middle, "all ms": list(ms), "ms, range": [min(ms), max(ms)], "losses": [1.0], "MFU %": 31.5}
    return {"size": "125M", "ranks": 2, "precision": "bf16", "contender": contender, "outcome": "passed", **figures}


# 20 us and 100e9 bytes per second.
TIMES = {1 << 16: 20.65536, 1 << 20: 30.48576, 1 << 28: 2704.35456}
BANDWIDTH = [sent("all-gather", "float32", 2, TIMES), sent("reduce-scatter", "bfloat16", 2, {1 << 20: 40.0})]
OUT_OF_MEMORY = {"size": "1.3B", "ranks": 2, "precision": "fp32", "contender": "torch fully_shard"}
STEPS = [
    trained("torch fully_shard", 50.0, 52.0, 51.0),
    trained("minifsdp fully_shard", 49.0, 70.0, 48.0),
    {**OUT_OF_MEMORY, "outcome": "passed", "result": "out of memory"},
]


def composed(bandwidth: list[dict[str, Any]], steps: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes = {
        "bandwidth/2-ranks": Outcome("passed", 1.0, findings=bandwidth),
        "steps/2-ranks/125M, bf16": Outcome("passed", 1.0, findings=steps),
    }
    return report.compose(CUDA, outcomes, ["bandwidth", "steps"], 0)


def files_of(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("it-") for path in folder.iterdir() if path.name not in ("it.md", "it.json"))


@pytest.mark.spec("KIT-18")
def test_report_has_both_tables_and_writes_all_files(tmp_path: Path) -> None:
    report.write(composed(BANDWIDTH, STEPS), tmp_path / "it.md")
    text = (tmp_path / "it.md").read_text()
    assert "## Bandwidth\n\n`spec_tools/gpu/bandwidth.py` describes" in text
    assert "| all-gather | 2 | float32 | 1048576 | 131072 | 30.48576 (29.48576 to 31.48576) |" in text
    assert "| 125M | 2 | bf16 | minifsdp fully_shard | 49.0 |" in text
    assert "| 1.3B | 2 | fp32 | torch fully_shard | out of memory |" in text
    assert files_of(tmp_path) == sorted(NAMES)
    read = report.read(tmp_path / "it.md")
    assert (read["bandwidth"], read["steps"]) == (BANDWIDTH, STEPS)


@pytest.mark.spec("KIT-18")
def test_without_figures_no_file_remains(tmp_path: Path) -> None:
    path = tmp_path / "it.md"
    assert len(write_beside(composed(BANDWIDTH, STEPS), path)) == len(NAMES)
    failed = {"ranks": 2, "outcome": "failed", "text": "hang"}
    assert write_beside(composed([failed], [STEPS[-1]]), path) == []
    assert files_of(tmp_path) == []


@pytest.mark.spec("KIT-18")
def test_csv_has_every_size_and_why_one_was_skipped() -> None:
    rows = list(csv.DictReader(bandwidth_table.as_csv(BANDWIDTH).splitlines()))
    assert tuple(rows[0]) == bandwidth_table.COLUMNS
    assert [row["bytes"] for row in rows] == ["65536", "1048576", "268435456", str(9 << 30), "1048576", str(9 << 30)]
    assert (rows[1]["us"], rows[1]["host us max"], rows[1]["wrong"]) == ("30.48576", "37.48576", "0")
    assert (rows[3]["unit"], rows[3]["us"], rows[3]["skipped"]) == ("Llama 7B block", "", "needs 9 MiB")
    # 268e6 bytes in 2.7 ms; half of it, 49.6e9 bytes per second, is 11 % of the link.
    assert (rows[2]["of link"], rows[2]["word"]) == ("11%", "WARN")


@pytest.mark.spec("KIT-18")
def test_costs_have_bytes_and_seconds_for_a_simulator_and_a_fit() -> None:
    found = json.loads(json.dumps(bandwidth_table.costs(BANDWIDTH)))
    assert (found["format"], found["cards"], found["shared"]) == (1, [H100], False)
    gather, scatter = found["collectives"]
    assert (gather["collective"], gather["ranks"]) == ("all-gather", 2)
    assert gather["rows"] == [[size, pytest.approx(us / 1e6)] for size, us in TIMES.items()]
    assert gather["latency"] == pytest.approx(20e-6)
    assert gather["rate"] == pytest.approx(100e9)
    assert gather["error"] == 0
    # One size: a line through zero.
    assert (scatter["latency"], scatter["rate"]) == (0, pytest.approx((1 << 20) / 40e-6))
    both = bandwidth_table.costs([*BANDWIDTH, sent("all-gather", "bfloat16", 2, TIMES), {"ranks": 8}])
    assert [len(one["rows"]) for one in both["collectives"]] == [6, 1]
    assert bandwidth_table.costs([{**BANDWIDTH[0], "shared": True}])["shared"] is True


@pytest.mark.spec("KIT-18")
def test_fit_weighs_relative_errors_and_has_no_negative_latency() -> None:
    # 10 us and 1e9 bytes per second; the largest size takes 10 % longer. An absolute fit has a latency of -33 us.
    points = [(10_000, 20e-6), (100_000, 110e-6), (1_000_000, 1010e-6 * 1.1)]
    found = bandwidth_table.fit(points)
    assert 8e-6 < found["latency"] < 12e-6
    assert 0.9e9 < found["rate"] < 1.1e9
    assert 0 < found["error"] < 0.1
    # Larger sizes take more than their share, so a straight line would have a negative latency.
    steep = bandwidth_table.fit([(1000, 1e-6), (2000, 4e-6)])
    assert steep["latency"] == 0
    assert steep["rate"] == pytest.approx(1e9 / 1.2)
    assert steep["error"] == pytest.approx(0.4)


@pytest.mark.spec("KIT-18")
def test_steps_have_the_format_of_pytest_benchmark() -> None:
    found = steps_table.as_benchmarks(STEPS, {"torch": "2.11.0", "NCCL": "2.28.9"}, "abc123+")
    assert (found["commit_info"]["id"], found["commit_info"]["dirty"]) == ("abc123", True)
    assert found["machine_info"]["NCCL"] == "2.28.9"
    assert found["machine_info"]["node"] == ""
    first, second = found["benchmarks"]
    assert first["group"] == second["group"] == "125M, 2 ranks, bf16"
    assert second["name"] == "step[125M, 2 ranks, bf16, minifsdp fully_shard]"
    assert second["extra_info"]["MFU %"] == 31.5
    stats = second["stats"]
    assert (stats["min"], stats["median"], stats["max"]) == (0.048, 0.049, 0.07)
    assert (stats["rounds"], stats["iterations"], stats["total"]) == (3, 1, pytest.approx(0.167))
    assert stats["stddev"] == pytest.approx(0.01242, abs=1e-5)
    assert (stats["q1"], stats["q3"]) == (pytest.approx(0.0485), pytest.approx(0.0595))
    assert stats["ops"] == pytest.approx(3 / 0.167)
    assert stats["outliers"] == "1;0"
    many = steps_table.as_benchmarks([trained("x", 1.0, 1.0, 1.0, 1.0, 9.0)], {}, "")["benchmarks"][0]["stats"]
    assert (many["iqr_outliers"], many["ld15iqr"], many["hd15iqr"]) == (1, 0.001, 0.001)
    one = steps_table.as_benchmarks([trained("x", 5.0)], {}, "")["benchmarks"][0]["stats"]
    assert (one["rounds"], one["stddev"], one["iqr"]) == (1, 0.0, 0.0)


@pytest.mark.spec("KIT-18")
def test_pictures_show_every_curve_and_every_contender() -> None:
    eight = sent("all-gather", "float32", 8, {1 << 20: 20.0, 1 << 22: 60.0})
    picture = ElementTree.fromstring(plots.bandwidth([*BANDWIDTH, eight]))
    # Only the largest number of ranks, and the peak of the card.
    assert [line.findtext(f"{SVG}title") for line in picture.iter(f"{SVG}polyline")] == [
        "NVLink of H100 SXM: 450",
        "all-gather, float32",
    ]
    width, height = map(float, picture.attrib["viewBox"].split()[2:])
    for line in picture.iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert "1 MiB" in "".join(picture.itertext())
    bars = ElementTree.fromstring(plots.steps(STEPS))
    assert [bar.attrib["class"] for bar in bars.iter(f"{SVG}rect")] == ["bar func torch", "bar func"]
    assert "125M, 2 ranks, bf16: ms" in "".join(bars.itertext())
    assert "minifsdp fully_shard: 49.00 [48.00-70.00]" in "".join(bars.itertext())
    shared = plots.bandwidth([{**one, "shared": True} for one in BANDWIDTH])
    assert "NVLink" not in shared
    assert "ranks share a device, so no speed has a meaning" in shared
    assert (plots.bandwidth([]), plots.steps([STEPS[-1]])) == ("", "")


@pytest.mark.spec("KIT-18")
@pytest.mark.parametrize("highest", [0.004, 0.3, 1.0, 4.4, 9.9, 37.0, 450.0, 3200.0])
def test_axis_has_few_ticks_and_reaches_the_highest_value(highest: float) -> None:
    ticks = plots._ticks(highest)
    assert 3 <= len(ticks) <= 11
    assert ticks[0] == 0
    assert ticks[-1] >= highest > ticks[-3]
