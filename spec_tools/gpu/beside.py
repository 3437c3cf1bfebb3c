"""The files next to the report. For ``build/gpu-report.md`` they are:

=================================  ====================================================================================
``gpu-report-bandwidth.csv``       all rows of the stage ``bandwidth``
``gpu-report-costs.json``          the time of each collective by bytes, for a simulator (``bandwidth_table.costs``)
``gpu-report-bandwidth.svg``       a picture of bandwidth over size
``gpu-report-steps.svg``           a picture of the step time of each contender
``gpu-report-benchmark.json``      the training steps, in the format of pytest-benchmark
=================================  ====================================================================================

The report has the same data. A file without data is not written, and one of an earlier run is deleted.

Spec: KIT-18.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_tools.gpu import bandwidth_table, plots, steps_table

__all__ = ["write_beside"]


def write_beside(report: Mapping[str, Any], path: Path) -> list[Path]:
    """Writes the files for a report; returns their paths.

    Args:
        report: from `report.compose`.
        path: the path of the report.
    """
    sent, trained = report["bandwidth"], report["steps"]
    measured = bandwidth_table.rows(sent)
    versions = report["hardware"].get("versions", {})
    benchmarks = steps_table.as_benchmarks(trained, versions, report["commit"])
    texts = {
        "bandwidth.csv": bandwidth_table.as_csv(sent) if measured else "",
        "costs.json": json.dumps(bandwidth_table.costs(sent)) if measured else "",
        "bandwidth.svg": plots.bandwidth(sent),
        "steps.svg": plots.steps(trained),
        "benchmark.json": json.dumps(benchmarks, indent=1) if benchmarks["benchmarks"] else "",
    }
    written = []
    for name, text in texts.items():
        file = path.with_name(f"{path.stem}-{name}")
        file.unlink(missing_ok=True)
        if text:
            file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
            written.append(file)
    return written
