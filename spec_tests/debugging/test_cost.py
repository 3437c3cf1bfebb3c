"""The command that measures the cost of the checks includes each check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from minifsdp.debugging import switch
from spec_tests.harness import ranks
from spec_tools.benchmarks import debug_cost
from spec_tools.benchmarks.workloads import WORKLOADS


@pytest.mark.spec("DEBUG-12")
@pytest.mark.cpu
@ranks(2)
def test_each_check_is_measured_with_each_api() -> None:
    small = replace(WORKLOADS["tiny"], build=lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    found = debug_cost.measure(small, steps=1, starts=1)
    assert tuple(found) == debug_cost.APIS
    for measured in found.values():
        assert tuple(measured["step"]) == tuple(debug_cost.CHECKS)
        assert tuple(measured["start"]) == debug_cost.AT_START
        ratios = [*measured["step"].values(), *measured["start"].values()]
        assert all(ratio[clock] > 0 for ratio in ratios for clock in debug_cost.CLOCKS)
    assert not switch._running
