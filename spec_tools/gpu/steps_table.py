"""The findings of the stage ``steps`` as a table, and in the format of pytest-benchmark.

``pytest-benchmark compare FILE --group-by=group`` prints the second. A group is a model, a number of ranks and a
precision, and a round is a group of steps. The file names no user and no host.

Spec: KIT-09, KIT-18.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

__all__ = ["as_benchmarks", "table"]

Finding = Mapping[str, Any]

SHOWN = (
    "ms", "host ms", "host share", "tokens/s", "TFLOP/s", "MFU %", "exposed ms", "peak GiB", "syncs", "mallocs",
    "launches",
)  # fmt: skip


def table(findings: Sequence[Finding]) -> Iterator[str]:
    """Lines of Markdown: a row for each contender."""
    yield "The tutorials' GPT; figures of rank 0. `spec_tools/gpu/steps.py` describes the columns."
    yield from ("", f"| model | ranks | precision | contender | {' | '.join(SHOWN)} |", "|---" * (4 + len(SHOWN)) + "|")
    for line in findings:
        figures = [str(line.get(figure, "")) for figure in SHOWN]
        if "ms" not in line:
            figures[0] = line.get("result", line["outcome"])
        yield f"| {' | '.join([line['size'], str(line['ranks']), line['precision'], line['contender'], *figures])} |"


def as_benchmarks(findings: Sequence[Finding], versions: Mapping[str, str], commit: str) -> dict[str, Any]:
    """The measured contenders as pytest-benchmark stores them."""
    now = datetime.now(UTC).isoformat()
    return {
        "machine_info": {"node": "", "machine": "", "cpu": {"brand_raw": ""}, **versions},
        "commit_info": {
            "id": commit.removesuffix("+"),
            "dirty": commit.endswith("+"),
            "time": now,
            "project": "minifsdp",
        },
        "benchmarks": [_benchmark(finding) for finding in findings if "all ms" in finding],
        "datetime": now,
        "version": "5.0.0",
    }


def _benchmark(finding: Finding) -> dict[str, Any]:
    group = f"{finding['size']}, {finding['ranks']} ranks, {finding['precision']}"
    name = f"step[{group}, {finding['contender']}]"
    extra = {
        figure: finding[figure] for figure in (*SHOWN, "losses", "parameters", "tokens", "card") if figure in finding
    }
    return {
        "group": group,
        "name": name,
        "fullname": f"spec_tools/gpu/steps.py::{name}",
        "params": {"contender": finding["contender"]},
        "param": finding["contender"],
        "extra_info": extra,
        "options": {"disable_gc": False, "timer": "perf_counter", "warmup": True},
        "stats": _stats([ms / 1000 for ms in finding["all ms"]]),
    }


def _stats(seconds: Sequence[float]) -> dict[str, Any]:
    """The statistics of pytest-benchmark; outliers are those of Tukey's box plot."""
    values = sorted(seconds)
    q1, median, q3 = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * values
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    low, high = q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1)
    inside = [value for value in values if low <= value <= high]
    far = sum(abs(value - mean) > deviation for value in values)
    return {
        "min": values[0],
        "max": values[-1],
        "mean": mean,
        "stddev": deviation,
        "rounds": len(values),
        "median": median,
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": len(values) - len(inside),
        "stddev_outliers": far,
        "outliers": f"{far};{len(values) - len(inside)}",
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": 1 / mean,
        "total": sum(values),
        "data": list(seconds),
        "iterations": 1,
    }
