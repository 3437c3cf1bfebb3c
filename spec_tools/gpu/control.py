"""The control: runs each failure again alone, and then with torch's own FSDP.

A failed test can have four causes: minifsdp, the machine, a behaviour of torch that minifsdp shares, or chance. Two
more runs separate them::

    failed test                  alone    with torch             verdict
    test_clip.py::test_norm      fails    passes                 minifsdp is wrong
    test_dcp.py::test_save       fails    fails, passes on CPUs  torch does the same
    test_summon.py::test_copy    fails    CUDA out of memory     this machine is wrong
    test_hook.py::test_twice     passes                          passes alone
    test_unit.py::test_slots     fails    does not apply         not decided

``docs/data/engine-torch.json`` records which tests fail with torch on CPUs. If torch fails such a test on a GPU too,
this proves nothing, so the verdict is *not decided*. A test does not apply to torch if it tests minifsdp's own code.

Failed chunks of ``smoke`` run again alone and with torch's FSDPs. Failed chunks of ``steps`` and ``races`` run again
alone; they contain their own comparison. Each of these runs is a chunk with a limit, so the control also continues
after an interruption.

Spec: KIT-20.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from spec_tools.gpu.chunks import ROOT, Chunk, Outcome
from spec_tools.gpu.progress import outcomes_in
from spec_tools.gpu.stages import STAGES, Settings, pytest_chunk

__all__ = ["MACHINE", "MINIFSDP", "OPEN", "TORCH", "compare", "control_chunks", "failures"]

LIMIT = 300.0  # seconds for one run of a test: start of the ranks, and the limit of a test on ranks
NUM_CHUNKS = 10  # most chunks of each stage that run again
WITH_TORCH = {"MINIFSDP_SPEC_ENGINE": "torch"}  # see spec_tests/subject
COMPARED = ("smoke", "steps", "races")

MINIFSDP, MACHINE, TORCH = "minifsdp is wrong", "this machine is wrong", "torch does the same"
ALONE, OPEN = "passes alone", "not decided"
# Errors below FSDP. They show a problem of the machine if torch's FSDP causes them too.
OF_MACHINE = re.compile(
    r"NCCL error|NCCL failure|DistBackendError|DistNetworkError|nccl\w*Error|CUDA error|CUDA out of memory|"
    r"CUBLAS_STATUS|CUDNN_STATUS|No space left on device|ended by SIG(?:BUS|KILL)"
)
NONDETERMINISTIC = "not deterministic"


def failures(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The failures: names of chunks of `COMPARED`, and tests.

    The order is that in which they run again. The first variants of different tests come first, so that one broken test
    with many variants does not use all runs.
    """
    tests: dict[str, None] = {}
    for name, outcome in outcomes.items():
        if name.startswith("suite/") and outcome.word in ("failed", "crashed", "hung"):
            tests.update(dict.fromkeys(_failed_tests(name, outcome)))
    seen: Counter[str] = Counter()
    order = {}
    for test in tests:
        function = test.partition("[")[0]
        order[test] = seen[function]
        seen[function] += 1
    chunks = [
        name
        for stage in COMPARED
        for name, outcome in outcomes.items()
        if name.split("/")[0] == stage and outcome.word in ("failed", "crashed", "hung")
    ]
    return [*chunks, *sorted(tests, key=order.__getitem__)]


def _failed_tests(chunk: str, outcome: Outcome) -> list[str]:
    """The failed tests of one file; the file itself if it failed and no test of it did."""
    found = [line["test"] for line in outcome.findings if line.get("outcome") == "failed"]
    if outcome.word != "failed" and outcome.findings and "started" in outcome.findings[-1]:
        found.append(outcome.findings[-1]["started"])
    return found or [f"spec_tests/{chunk.removeprefix('suite/')}"]


# ---- chunks ---------------------------------------------------------------------------------------------------------


def control_chunks(settings: Settings) -> list[Chunk]:
    """Two chunks for each failure that is in the progress file, at most ``settings.num_again`` tests."""
    failed = failures(outcomes_in(settings.folder))
    tests = [what for what in failed if not _is_chunk(what)][: settings.num_again]
    by_stage = {stage: [what for what in failed if what.startswith(f"{stage}/")] for stage in COMPARED}
    known = {
        chunk.name: chunk
        for stage in STAGES
        if by_stage.get(stage.name)
        for chunk in stage.chunks(settings)  # a list of commands: nothing runs here
    }
    chunks = [known[name] for names in by_stage.values() for name in names[:NUM_CHUNKS] if name in known]
    return [
        *(one for chunk in chunks for one in _again(chunk)),
        *(one for test in tests for one in _run(test, settings)),
    ]


def _is_chunk(what: str) -> bool:
    return what.split("/")[0] in COMPARED


def _again(chunk: Chunk) -> list[Chunk]:
    """The same chunk again, and for ``smoke`` also with torch."""
    alone = replace(chunk, name=_name(chunk.name, "alone"))
    if not chunk.name.startswith("smoke/"):
        return [alone]
    return [alone, replace(chunk, name=_name(chunk.name, "torch"), environment={**chunk.environment, **WITH_TORCH})]


def _run(test: str, settings: Settings) -> list[Chunk]:
    short = replace(settings, limit=min(settings.limit, LIMIT))
    return [
        pytest_chunk(_name(test, "alone"), Path(test), short),
        pytest_chunk(_name(test, "torch"), Path(test), short, "--engine", "torch"),
    ]


def _name(what: str, how: str) -> str:
    """The name of a chunk, which is also a path: readable, short, and different for different tests."""
    digest = hashlib.sha256(what.encode()).hexdigest()[:6]
    begin, colons, test = what.partition("::")
    words = re.sub(r"[^a-zA-Z0-9_.-]+", "-", begin.rpartition("/")[2] + colons + test if colons else begin)[:60]
    return f"control/{words}-{digest}/{how}"


# ---- verdicts -------------------------------------------------------------------------------------------------------


def compare(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """For each failure: the outcomes alone and with torch, the verdict, and torch's error."""
    return [_compare(what, outcomes) for what in failures(outcomes)]


def _compare(what: str, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    again, with_torch = (outcomes.get(_name(what, how)) for how in ("alone", "torch"))
    finding = {"what": what, "alone": _alone(again), "torch": "", "verdict": OPEN, "torch's error": ""}
    if again is None:
        return finding
    if with_torch is not None:
        finding["torch"], finding["torch's error"] = _torch(what, with_torch)
    if again.word == "passed":
        finding["verdict"] = ALONE
    elif what.startswith(("steps/", "races/")):
        finding["verdict"] = OPEN if NONDETERMINISTIC in again.last_lines else MINIFSDP
    else:
        finding["verdict"] = _verdict(finding)
    return finding


def _alone(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run again"
    return ALONE if outcome.word == "passed" else "fails alone too"


PASSES, FAILS, ALSO_ON_CPUS = "torch passes", "also fails with torch", "fails with torch, on CPUs too"
NOT_FOR_TORCH = "does not apply to torch"


def _torch(what: str, outcome: Outcome) -> tuple[str, str]:
    """The outcome with torch, and its error."""
    tests = [line for line in outcome.findings if "test" in line]
    texts = [line.get("text", "") for line in outcome.findings]
    if outcome.word == "passed":
        return PASSES, ""
    if any("nothing ran" in line for line in outcome.findings) or any("NotOfferedError" in text for text in texts):
        return NOT_FOR_TORCH, ""
    known_on_cpus = what.partition("[")[0] in failed_on_cpus()
    if known_on_cpus and (tests or outcome.word != "failed"):
        return ALSO_ON_CPUS, outcome.reason
    return FAILS, outcome.reason


def _verdict(finding: Mapping[str, str]) -> str:
    if finding["torch"] == PASSES:
        return MINIFSDP
    if finding["torch"] in (FAILS, ALSO_ON_CPUS) and OF_MACHINE.search(finding["torch's error"]):
        return MACHINE
    return TORCH if finding["torch"] == FAILS else OPEN


@cache
def failed_on_cpus() -> set[str]:
    """The tests, without their parameters, that failed with torch in the recorded run on CPUs."""
    path = ROOT / "docs" / "data" / "engine-torch.json"
    rows: Mapping[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}
    return {test for row in rows.values() for test in row["failed"]}


def counts(findings: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """The number of failures for each verdict."""
    return Counter(finding["verdict"] for finding in findings)
