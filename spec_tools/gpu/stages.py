"""The table of stages: a question, and the jobs that answer it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_tools.gpu.process import ROOT, Job

TESTS = ROOT / "spec_tests"
# Trains a small model with both APIs and all strategies, with replicas, with accumulation and in bfloat16.
SMOKE = TESTS / "parity" / "test_parity.py"
QUICK_FILES = ("transport/test_collectives.py", "checkpoint/test_checkpoint_refusals.py", "prefetch/test_counts.py")
NUM_SEEDS, NUM_QUICK_SEEDS = 12, 3
LIMIT, LONG_LIMIT = 900.0, 3600.0  # seconds of a job; the second is that of a job with many findings


@dataclass(frozen=True)
class Settings:
    """The user's options.

    Attributes:
        device: ``cuda``, ``cpu`` or ``simulated``.
        num_devices: number of ranks that can have a device of their own.
        quick: whether to run less of each stage.
        limit: seconds of a job; None for the limit of its stage.
    """

    device: str
    num_devices: int = 1
    quick: bool = False
    limit: float | None = None

    def sizes(self) -> list[int]:
        """Numbers of ranks: 2, and 4 and 8 if there are enough devices. If there is only one, two ranks share it."""
        return [2, *(size for size in (4, 8) if size <= self.num_devices)]


@dataclass(frozen=True)
class Stage:
    """A question, and the jobs that answer it."""

    question: str
    jobs: Callable[[Settings], list[Job]]


def _job(settings: Settings, stage: str, limit: float = LIMIT, **arguments: Any) -> Job:
    """A job that runs ``work`` of the module with the name of the stage."""
    command = [sys.executable, "-m", "spec_tools.gpu.job", stage, settings.device, json.dumps(arguments)]
    return Job(f"{stage}/{arguments.get('num_ranks', 'all')}", command, settings.limit or limit)


def _hardware(settings: Settings) -> list[Job]:
    return [_job(settings, "hardware")]


def _smoke(settings: Settings) -> list[Job]:
    return [_file(settings, "smoke", SMOKE, "-k", "mlp", "--maxfail", "3")]


def _collectives(settings: Settings) -> list[Job]:
    return [
        _job(settings, "collectives", num_ranks=size, shared=size > settings.num_devices) for size in settings.sizes()
    ]


def _steps(settings: Settings) -> list[Job]:
    models = ["125M", "350M", "1.3B"] if settings.device == "cuda" else ["tiny"]
    # One rank has no communication, so it shows what the host does. More ranks only if each has a device.
    most = settings.sizes()[-1]
    sizes = [1, most] if most <= settings.num_devices else [1]
    return [
        _job(settings, "steps", LONG_LIMIT, num_ranks=size, models=models[:1] if settings.quick else models)
        for size in sizes
    ]


def _races(settings: Settings) -> list[Job]:
    # Two replicas of two shards need four ranks, even if they share a device.
    sizes = {4, settings.sizes()[-1]} - {2}
    num_seeds = NUM_QUICK_SEEDS if settings.quick else NUM_SEEDS
    # A CPU has no streams, so it only shows that the stage runs.
    configurations = ["wrapper", "function, hybrid"] if settings.device == "cpu" else []
    return [
        _job(settings, "races", LONG_LIMIT, num_ranks=size, num_seeds=num_seeds, configurations=configurations)
        for size in sorted(sizes)
    ]


def _suite(settings: Settings) -> list[Job]:
    texts = {path: path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
    order = sorted(texts, key=lambda path: ("mark.gpu" not in texts[path], '"STREAM-' not in texts[path]))
    quick = [TESTS / name for name in QUICK_FILES]
    return [_file(settings, "suite", path) for path in (quick if settings.quick else order)]


def _file(settings: Settings, stage: str, path: Path, *options: str) -> Job:
    """A job that runs one test file."""
    words = [str(path), "--device", settings.device, "-p", "spec_tools.gpu.note", "-q", "--tb=short", *options]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return Job(f"{stage}/{path.relative_to(TESTS)}", command, settings.limit or LIMIT)


STAGES = {
    "hardware": Stage("which devices and versions are there", _hardware),
    "smoke": Stage("does each kind of step agree with a single process and with torch", _smoke),
    "collectives": Stage("are all-gather and reduce-scatter right, and how fast are they", _collectives),
    "steps": Stage("how long does a step take beside torch's, and do the losses agree", _steps),
    "races": Stage("do the bits stay the same when streams are delayed", _races),
    "suite": Stage("the tests of the spec: do they pass", _suite),
}
