"""The tests that a run would do in its time: ``python -m spec_tools.gpu --minutes 12 --plan``. It starts no rank.

The times are those of earlier runs, or guesses. The plan goes through the same stages in the same order as a run, with
a clock that advances by the expected seconds.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_tools.gpu import cover, suite
from spec_tools.gpu.code import ROOT
from spec_tools.gpu.cover import Case
from spec_tools.gpu.stages import STAGES, limits

# Guesses of seconds until a run has measured them. The collection of all tests is not measured.
START_UP = {"process": 0.1, "import": 4.0, "1 rank": 5.0, "2 ranks": 8.0, "4 ranks": 12.0, "8 ranks": 20.0}
COLLECTION = 20.0


def plan_for(
    cases: Mapping[str, Sequence[Case]], names: Sequence[str], seconds: float, record: Mapping[str, Any]
) -> tuple[dict[str, list[Case]], dict[str, float]]:
    """The tasks and tests of each stage that a run does in so many seconds, and the time of each stage."""
    start_up = START_UP | {name: one for run in record["runs"] for name, one in run.get("start_up", {}).items()}
    planned: dict[str, list[Case]] = {stage: [] for stage in STAGES}
    spent = Counter({names[0]: start_up["process"] + start_up["import"] + COLLECTION})
    pools = {0}
    for stage, until in limits(names, spent.total(), seconds):
        left = [case for case in cases[stage] if case not in planned[stage]]
        for case in cover.in_time(left, until, spent.total):
            if case.num_ranks not in pools:
                pools.add(case.num_ranks)
                spent[stage] += start_up.get(suite.ranks(case.num_ranks), 0.0)
            spent[stage] += case.seconds
            planned[stage].append(case)
    return planned, dict(spent)


def cases_of(device: str, tests: Sequence[str]) -> dict[str, list[Case]]:
    """The tasks and tests of each stage, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cases.json")
        command = [*suite.command_for(tests, device), "--collect-only", "--gpu-cases", str(path)]
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        return {
            stage: [Case(**{**case, "rows": tuple(case["rows"])}) for case in cases]
            for stage, cases in json.loads(path.read_text()).items()
        }


def show(device: str, tests: Sequence[str], names: Sequence[str], seconds: float) -> int:
    """Prints the plan."""
    cases, record = cases_of(device, tests), cover.record()
    planned, spent = plan_for(cases, names, seconds, record)
    known = cover.known_seconds(record)
    measured = sum(case.name in known for some in cases.values() for case in some)
    print(f"{measured} of {sum(map(len, cases.values()))} durations are measured, the others are guesses")
    print(f"{'stage':14}{'seconds':>9}{'planned':>9}{'of':>7}{'requirements':>14}{'of':>6}")
    for stage in STAGES:
        counts = []
        for some in (planned[stage], cases[stage]):
            counts += [len(some), len(cover.rows_of(case for case in some if case.uses_device))]
        print(f"{stage:14}{spent.get(stage, 0):9.0f}{counts[0]:9}{counts[2]:7}{counts[1]:14}{counts[3]:6}")
    return 0
