"""The benchmarks of the checks: only the check that is measured is on, in a step and at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import nn

from minifsdp.checks.collective import Collective
from minifsdp.debugging import switch
from minifsdp.engine.events import events
from spec_tests.harness import ranks
from spec_tools.benchmarks import checks
from spec_tools.benchmarks.workloads import WORKLOADS

SMALL = replace(WORKLOADS["tiny"], build=lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))


@pytest.mark.spec("DEBUG-12")
@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
@ranks(2)
def test_only_the_measured_check_is_on_while_its_step_or_start_is_timed() -> None:
    seen: list[tuple[set[str], bool]] = []

    def timer(action: Callable[[], Any]) -> None:
        action()
        seen.append((set(switch._running), events.collective is Collective))

    with mock.patch.dict(WORKLOADS, {"small": SMALL}):
        for api in checks.APIS:
            for check in (*checks.OFF, *checks.CHECKS):
                wanted = set(switch.CHECKS) if check == "all" else {check} & set(switch.CHECKS)
                checks.step(timer, "small", api, check)
                assert seen.pop() == (wanted, check != "no ledger")
            for check in (*checks.OFF[1:], *checks.AT_START):
                wanted = set(switch.CHECKS) if check == "all" else {check} & set(switch.CHECKS)
                checks.start(timer, "small", api, check)
                assert seen.pop() == (wanted, True)
    assert not switch._running
