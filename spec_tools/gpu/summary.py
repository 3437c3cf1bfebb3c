"""The summary at the beginning of a report: at most ten lines, for the text of an issue.

::

    * 8 x NVIDIA H100 80GB HBM3; minifsdp 1.0.0, commit 0123456789ab
    * Python 3.12.3, torch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, driver 580.159.04
    * passed: hardware, collectives, smoke, steps
    * failed: suite (2 of 130), races (1 of 22)
    * tests: 1703 passed, 5 failed, 3 skipped; requirements: 412 proven, 2 failed
    * race hunt: 22 configurations, 8104 delays, 1 different
    * training steps: 0.71 to 0.85 times the time of torch
    * worst: races/2-ranks/wrapper: seed 4, step 1, blocks.0.weight: 12 of 256 bytes differ
    * **verdict: minifsdp is wrong (1), torch does the same (1)**

The verdicts are those of ``control``. A failure of a stage that does not use minifsdp is one of the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_tools.gpu.control import ALONE, MACHINE, MINIFSDP, OPEN, TORCH
from spec_tools.gpu.stages import STAGES

__all__ = ["summary", "verdict", "worst"]

# Stages that call torch and the driver only.
WITHOUT_MINIFSDP = ("hardware", "links", "collectives", "bandwidth")
VERDICTS = (MINIFSDP, MACHINE, TORCH, OPEN, ALONE)
BAD = ("failed", "crashed", "hung")
LENGTH = 200  # of a line


def summary(report: Mapping[str, Any]) -> list[str]:
    """The lines."""
    return [f"* {line if len(line) <= LENGTH else line[: LENGTH - 3] + '...'}" for line in _lines(report)]


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    hardware = report["hardware"]
    commit = f"commit {report['commit'] or 'unknown'}"
    if hardware:
        yield f"{_devices(hardware['devices'])}; minifsdp {report['minifsdp']}, {commit}"
        yield ", ".join(f"{name} {version}" for name, version in hardware["versions"].items())
    else:
        yield f"the hardware was not inspected; minifsdp {report['minifsdp']}, {commit}"
    passed, failed = _stages(report)
    yield f"passed: {', '.join(passed) or 'none'}"
    if failed:
        yield f"failed: {', '.join(failed)}"
    if report["chunks_not_run"]:
        yield f"**not complete**: {report['chunks_not_run']} chunks were not run"
    if any(report["tests"].values()):
        tests = ", ".join(f"{number} {word}" for word, number in report["tests"].items())
        rows = ", ".join(f"{len(rows)} {word}" for word, rows in report["rows"].items())
        yield f"tests: {tests}; requirements: {rows}"
    if report["races"]:
        seeds = [line for line in report["races"] if line.get("seed", -1) >= 0]
        different = sum(line["outcome"] == "failed" for line in report["races"])
        configurations = {(line["configuration"], line["ranks"]) for line in report["races"]}
        delays = sum(line["delays"] for line in seeds)
        yield f"race hunt: {len(configurations)} configurations, {delays} delays, {different} different"
    if ratios := _ratios(report["steps"]):
        yield f"training steps: {min(ratios):.2f} to {max(ratios):.2f} times the time of torch"
    if found := worst(report):
        yield f"worst: {found}"
    yield f"**verdict: {verdict(report)}**"


def _devices(devices: Sequence[Mapping[str, Any]]) -> str:
    names = Counter(device["name"] for device in devices)
    return ", ".join(f"{number} x {name}" for name, number in names.items())


def _stages(report: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The stages whose chunks have all passed, and those with a failed chunk, with numbers."""
    words: dict[str, list[str]] = {}
    for name, chunk in report["chunks"].items():
        words.setdefault(name.split("/")[0], []).append(chunk["word"])
    words.pop("control", None)
    numbers = {stage: sum(word in BAD for word in of_it) for stage, of_it in words.items()}
    passed = [stage for stage, of_it in words.items() if set(of_it) == {"passed"}]
    return passed, [f"{stage} ({number} of {len(words[stage])})" for stage, number in numbers.items() if number]


def _ratios(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Times of a step of minifsdp, divided by those of torch with the same API."""
    times = {
        (line["size"], line["ranks"], line.get("precision", ""), line["contender"]): line["ms"]
        for line in steps
        if line.get("outcome") == "passed" and line.get("ms")
    }
    pairs = {key: (*key[:3], key[3].replace("minifsdp", "torch")) for key in times if "minifsdp" in key[3]}
    return [times[key] / times[other] for key, other in pairs.items() if other in times]


def worst(report: Mapping[str, Any]) -> str:
    """The failure to look at first, in one line; empty if there is none.

    The order: a stage without minifsdp, the smoke test, wrong bits, failures for which minifsdp is the cause, the rest.
    """
    failed = {name: chunk for name, chunk in report["chunks"].items() if chunk["word"] in BAD}
    failed = {name: chunk for name, chunk in failed.items() if not name.startswith("control/")}
    for stage in (*WITHOUT_MINIFSDP, "smoke", "races"):
        for name, chunk in failed.items():
            if name.split("/")[0] == stage:
                return f"{name}: {chunk['reason']}"
    of_minifsdp = [one["what"] for one in report["control"] if one["verdict"] == MINIFSDP]
    texts = {test["test"]: test.get("text", "") for test in report["failed_tests"]}
    for what in of_minifsdp:
        return f"{what}: {_error(texts[what]) if what in texts else failed[what]['reason'] if what in failed else ''}"
    return next((f"{name}: {chunk['reason']}" for name, chunk in failed.items()), "")


def _error(text: str) -> str:
    """The error of a test, from pytest's text."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return (marked or [line.strip() for line in text.splitlines() if line.strip()][-1:] or [""])[0]


def verdict(report: Mapping[str, Any]) -> str:
    """The conclusion, with the number of failures for each cause."""
    failed = {name: chunk for name, chunk in report["chunks"].items() if chunk["word"] in BAD}
    numbers = Counter(one["verdict"] for one in report["control"])
    numbers[MACHINE] += sum(name.split("/")[0] in WITHOUT_MINIFSDP for name in failed)
    # Stages that the control does not run again.
    numbers[OPEN] += sum(name.startswith("benchmarks/") for name in failed)
    if not numbers.total():
        missing = {stage.name for stage in STAGES} - {"control"} - {name.split("/")[0] for name in report["chunks"]}
        return "nothing failed, but not everything has run" if missing or report["chunks_not_run"] else "passed"
    return ", ".join(f"{word} ({numbers[word]})" for word in VERDICTS if numbers[word])
