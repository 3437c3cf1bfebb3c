"""The tests: runs them in the order of the requirements that no GPU has shown yet, until the time is over.

The parent gives it the stages of tests, each with the moment of its end. All stages run in this one process, because
the start of CUDA and NCCL takes longer than most tests: the pools of ranks stay alive. Each test is a line of the
journal as soon as it is over. The line has its requirements, the kind of evidence, and the digest of its code.

``--plan`` uses the same plugin to collect the tests, and runs none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import pytest
import torch

from spec_tests.harness import worker
from spec_tests.harness.accounting import KINDS, rows_of_accelerators, rows_proven_by
from spec_tools.gpu import cover, journal, tasks
from spec_tools.gpu.code import digest_of
from spec_tools.gpu.cover import Case
from spec_tools.gpu.hardware import num_devices
from spec_tools.gpu.stages import STAGES, limits

TASKS = "spec_tools/gpu/tasks.py"
# Trains a small model with both APIs and all strategies, with replicas, with accumulation and in bfloat16.
SMOKE = "spec_tests/parity/test_parity.py"
# Tests of these files failed on an H100, and the cause is not known.
UNEXPLAINED = (
    "spec_tests/construction/test_constructor.py",
    "spec_tests/cases/test_compiled_models.py",
)
NO_DEVICE = "no device"
LONGEST_TEXT = 20_000  # characters of the output of a failed test; those of `UNEXPLAINED` have all of it


@dataclass(eq=False)
class Suite:
    """The plugin.

    Attributes:
        stages: the stages that run; empty to collect only.
        until: the moment at which the run ends.
        cases: the tasks or tests of each stage, in order.
        reports: pytest's reports of the test that runs.
    """

    stages: list[str]
    until: float
    cases: dict[str, list[Case]] = field(default_factory=dict)
    reports: list[pytest.TestReport] = field(default_factory=list)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Makes the tasks."""
        if "arguments" in metafunc.fixturenames and metafunc.module.__name__ == tasks.__name__:
            device = metafunc.config.getoption("--device")
            every = []
            for name, stage in STAGES.items():
                marks = [pytest.mark.spec(stage.row), *([pytest.mark.accelerator] if device != "cpu" else [])]
                made = stage.tasks(device, num_devices(device)) if stage.tasks else {}
                every += [pytest.param(name, made[task], id=f"{name} {task}", marks=marks) for task in made]
            metafunc.parametrize(("stage", "arguments"), every)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure, and the other files run."""
        if report.failed and self.stages:
            facts = {"name": report.nodeid, "stage": "", "outcome": "failed", "seconds": 0.0}
            journal.leave({**facts, "text": report.longreprtext})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Sorts the tests into the stages."""
        earlier = cover.record()
        known = cover.known_seconds(earlier)
        found: dict[str, list[Case]] = {name: [] for name in ["", *STAGES]}
        for item in session.items:
            found[_stage_of(item)].append(_case(item, known))
        shown = cover.rows_of(case for case in found["smoke"] + found["unexplained"] if case.uses_device)
        rows = earlier["rows"] if session.config.getoption("--device") == "cuda" else {}
        proven = {row for row, one in rows.items() if one["outcome"] == "passed"}
        older = {row for row in proven if rows[row]["code"] != digest_of(rows[row]["test"])} - shown
        ordered = cover.in_order(found.pop(""), proven | shown, older, rows_of_accelerators())
        found["requirements"], found["variants"] = ordered
        self.cases = found
        if path := session.config.getoption("--gpu-cases"):
            path.write_text(json.dumps({stage: [asdict(case) for case in cases] for stage, cases in found.items()}))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the stages."""
        items = {item.nodeid: item for item in session.items}
        if self.stages:
            journal.leave({"planned": {stage: len(self.cases[stage]) for stage in self.stages}})
        for stage, until in limits(self.stages, time.time(), self.until):
            known = journal.read()
            left = [case for case in self.cases[stage] if case.name not in known.results]
            # A test that was running when a run was cut off comes last.
            left.sort(key=lambda case: case.name in known.started)
            for case in cover.in_time(left, until):
                self._run(items[case.name], case, stage)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the reports of set-up, call and tear-down."""
        self.reports.append(report)

    def _run(self, item: pytest.Item, case: Case, stage: str) -> None:
        facts = {
            "name": case.name,
            "stage": stage,
            "rows": list(case.rows),
            "kind": next((marker.args[0] for marker in item.iter_markers("proof")), KINDS[0]),
            "evidence": evidence(case),
            "code": digest_of(case.name),
        }
        begin = time.time()
        journal.leave({**facts, "started": begin})
        self.reports.clear()
        # No next item: the order is not by file, so each test removes its fixtures.
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        # The worst of set-up, call and tear-down.
        report = max(self.reports, key=lambda one: ("passed", "skipped", "failed").index(one.outcome))
        facts |= {"outcome": report.outcome, "seconds": round(time.time() - begin, 3)}
        facts |= item.stash.get(tasks.FINDING, {})
        if report.failed:
            text = "\n".join([report.longreprtext, *(f"{name}\n{output}" for name, output in report.sections)])
            facts["text"] = text if stage == "unexplained" else text[:LONGEST_TEXT]
        journal.leave(facts)


def evidence(case: Case) -> str:
    """The kind of evidence: the number of ranks, the backend, and whether they share a GPU."""
    if not case.uses_device:
        return NO_DEVICE
    number, kind = case.num_ranks, worker.device_here.type
    if kind != "cuda":
        return f"{ranks(number)}, {'gloo' if kind == 'cpu' else 'simulated'}"
    if number < 2:
        return "1 rank, NCCL" if number else "1 process on a GPU"
    if number <= torch.cuda.device_count():
        return f"{number} GPUs, NCCL"
    return f"{ranks(number)} on one GPU, NCCL over sockets"


def ranks(number: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} rank{'s' if number > 1 else ''}"


def _stage_of(item: pytest.Item) -> str:
    """The stage of a task or test; empty for the stages of requirements and variants."""
    if item.nodeid.startswith(TASKS):
        return str(item.callspec.params["stage"])  # type: ignore[attr-defined]
    if item.nodeid.startswith(UNEXPLAINED):
        return "unexplained"
    return "smoke" if item.nodeid.startswith(SMOKE) and "mlp" in item.name else ""


def _case(item: pytest.Item, known: dict[str, float]) -> Case:
    marker = item.get_closest_marker("ranks")
    # A test that starts ranks itself has the marker without a number.
    num_ranks = int((marker.args or [1])[0]) if marker else 0
    if item.nodeid.startswith(TASKS):
        num_ranks = item.callspec.params["arguments"].get("num_ranks", 1)  # type: ignore[attr-defined]
    guess = known.get(_stage_of(item), known.get(str(num_ranks), known["4"]))
    is_for_gpus = item.get_closest_marker("gpu") is not None
    return Case(item.nodeid, tuple(rows_proven_by(item)), num_ranks, known.get(item.nodeid, guess), is_for_gpus)


def command_for(tests: Sequence[str], device: str) -> list[str]:
    """The command of pytest with this plugin, for the tasks and for these files or folders of tests."""
    options = ["-p", "spec_tools.gpu.plugin", "-p", "no:cacheprovider", "-q", "--tb=short", "--variants", "all"]
    options += ["--continue-on-collection-errors", "--device", device]
    return [sys.executable, "-m", "pytest", TASKS, *tests, *options]
