"""The benchmarks: a step of each contender, a step with each check, and each kind of optimizer.

Tests do not assert on times, because they depend on the load of the machine. A step asserts the losses, and that
minifsdp calls fewer functions, sends no more bytes and needs no more memory than torch's FSDP with the same features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spec_tools.benchmarks import checks, optimizers, steps
from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.workloads import WORKLOADS

OnRanks = Callable[..., Any]
each_api = pytest.mark.parametrize("api", checks.APIS)
# The figures of the contenders that have been measured.
MEASURED: dict[tuple[str, str], dict[str, Any]] = {}


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_step(benchmark: Any, on_ranks: OnRanks, name: str, contender: str) -> None:
    workload = WORKLOADS[name]
    if not CONTENDERS[contender].runs(workload):
        pytest.skip("not supported")
    benchmark.group = name
    ours = on_ranks(workload.num_ranks, workload.rounds, steps.train, name, contender)
    benchmark.extra_info |= {"contender": contender, **ours}
    MEASURED[name, contender] = ours
    theirs = MEASURED.get((name, CONTENDERS[contender].peer or ""))
    if theirs:
        assert ours["calls"] < theirs["calls"]
        assert ours["asked"] <= theirs["asked"]
        # The counts of the kernel include barriers and acknowledgements of gloo.
        assert ours["wired"] <= 1.01 * theirs["wired"] + 4096
        assert ours["between_steps"] <= 1.001 * theirs["between_steps"]
        # There may be one more activation while a gradient is in flight.
        assert ours["peak"] <= 1.005 * theirs["peak"]


@each_api
@pytest.mark.parametrize("check", [*checks.OFF[:2], *checks.CHECKS])
def test_check_in_a_step(benchmark: Any, on_ranks: OnRanks, api: str, check: str) -> None:
    benchmark.group = f"step, {api}"
    benchmark.extra_info["check"] = check
    on_ranks(2, 30, checks.step, "gpt", api, check)


@each_api
@pytest.mark.parametrize("check", [*checks.OFF[1:], *checks.AT_START])
def test_check_at_the_start(benchmark: Any, on_ranks: OnRanks, api: str, check: str) -> None:
    benchmark.group = f"start, {api}"
    benchmark.extra_info["check"] = check
    on_ranks(2, 5, checks.start, "gpt", api, check)


@pytest.mark.parametrize("action", optimizers.ACTIONS)
@pytest.mark.parametrize("contender", [name for name, one in CONTENDERS.items() if one.shards or name == "single"])
def test_optimizer(benchmark: Any, on_ranks: OnRanks, contender: str, action: str) -> None:
    benchmark.group = "optimizer"
    benchmark.extra_info |= {"contender": contender, "action": action}
    on_ranks(2, 25, optimizers.act, contender, action)
