"""The recorded numbers of Python calls are those of the current engine."""

from __future__ import annotations

import pytest
import torch

from docs_build.recording import records
from spec_tests.costs.count_growth import OURS, UNITS
from spec_tests.costs.test_growth import counted


@pytest.mark.parametrize("name", OURS)
def test_record_counts_the_calls_of_the_current_engine(name: str) -> None:
    record = records.load("growth")
    # Another version of torch may make slightly more or fewer calls.
    apart = 0.01 if f"torch {torch.__version__}" in record["circumstances"][-1] else 0.05
    today = dict(zip(UNITS, counted(2)[name]["units"], strict=True))
    for units, point in zip(record["axes"]["units"], record["units"][name], strict=True):
        if units in today:
            assert point["calls"] == pytest.approx(today[units] / units, rel=apart), (
                f"{units} units: the engine has changed: python -m spec_tools.benchmarks.growth --calls"
            )
