"""The stages and their chunks.

The first stages are layers. Each of them uses what the layers before it have checked, so a failure ends the run::

    node           hardware       a rank alone on its device
    links          links          two ranks
    collectives    collectives    all ranks, without minifsdp
    one step       smoke          both APIs

The stages after them do not depend on each other, so a failure there does not end the run. The stage ``first_step``
answers within the first minute whether a step works at all. If it does not, the layers find the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_tools.gpu.chunks import ROOT, Chunk
from spec_tools.gpu.platforms import Platform

__all__ = ["STAGES", "Settings", "Stage", "pytest_chunk"]

# Folders whose tests do not use a device: those of the harness, of the site, and the benchmarks, which are a stage.
QUICK_FILES = ("engine/test_collectives.py", "checkpoint/test_agreement.py", "fsdp2/test_counts.py")
MODULES = {"first_step": "smoke"}  # stage -> module, where the names differ
# Seconds for a chunk of one of the first three stages: a pool may take two minutes to start, and a test one minute.
FIRST_LIMIT = 600.0
BENCHMARKS_LIMIT = 3600.0
NUM_SEEDS, NUM_QUICK_SEEDS = 12, 3


@dataclass(frozen=True)
class Settings:
    """The user's options.

    Attributes:
        platform: the platform of the run.
        folder: the folder for all files of this run.
        limit: seconds for one test file, or for one configuration of the race hunt.
        quick: whether to run fewer checks.
        num_again: number of failed tests that the stage ``control`` runs again.
        with_names: whether the report may contain names of hosts and users, and paths.
    """

    platform: Platform
    folder: Path
    limit: float = 900.0
    quick: bool = False
    num_again: int = 40
    with_names: bool = False


@dataclass(frozen=True)
class Stage:
    """A name, what it checks, its chunks, whether a failure ends the run, and the name of its layer."""

    name: str
    question: str
    chunks: Callable[[Settings], list[Chunk]]
    is_vital: bool = False
    layer: str = ""


def _piece(name: str, settings: Settings, limit: float, **arguments: Any) -> Chunk:
    """A chunk that runs ``work`` of the module with the name of the stage."""
    stage = name.split("/")[0]
    words = [MODULES.get(stage, stage), settings.platform.name, json.dumps(arguments)]
    return Chunk(name, [sys.executable, "-m", "spec_tools.gpu.piece", *words], limit)


def _hardware(settings: Settings) -> list[Chunk]:
    return [_piece("hardware/all", settings, FIRST_LIMIT, num_ranks=_num_first_ranks(settings.platform))]


def _num_first_ranks(platform: Platform) -> int:
    """A rank for each device. Without GPUs two, so that this code runs with several ranks."""
    return max(platform.num_devices(), 1 if platform.name == "cuda" else 2)


def _first_step(settings: Settings) -> list[Chunk]:
    num_ranks = _num_first_ranks(settings.platform)
    return [_piece("first_step/all", settings, FIRST_LIMIT, num_ranks=num_ranks)]


def _links(settings: Settings) -> list[Chunk]:
    num_ranks = max(2, settings.platform.num_devices())
    return [_piece("links/all", settings, FIRST_LIMIT, num_ranks=num_ranks)]


def _collectives(settings: Settings) -> list[Chunk]:
    return [
        _piece(f"collectives/{size}-ranks", settings, FIRST_LIMIT, num_ranks=size)
        for size in settings.platform.world_sizes()
    ]


def _smoke(settings: Settings) -> list[Chunk]:
    return [
        _piece(f"smoke/{size}-ranks", settings, FIRST_LIMIT, num_ranks=size)
        for size in (1, *settings.platform.world_sizes())
    ]


def _bandwidth(settings: Settings) -> list[Chunk]:
    from spec_tools.gpu.bandwidth import estimate

    platform, quick = settings.platform, settings.quick
    sizes = platform.world_sizes()[-1:] if quick else platform.world_sizes()
    arguments = {"quick": quick, "hang_limit": settings.limit / 5}
    chunks = [_piece(f"bandwidth/{n}-ranks", settings, settings.limit, num_ranks=n, **arguments) for n in sizes]
    return [replace(chunk, estimate=estimate(platform.largest, quick)) for chunk in chunks]


def _steps(settings: Settings) -> list[Chunk]:
    # One rank has no communication, so it shows what the host does. More ranks only where each has a device.
    models = settings.platform.sizes
    own = [size for size in settings.platform.world_sizes() if size <= settings.platform.num_devices()]
    if settings.quick:
        return [_step(settings, size, models[0], "bf16", 1) for size in (1, *own[-1:])]
    most = max([1, *own])
    chunks = [_step(settings, size, model, "bf16", 2) for size in sorted({1, most}) for model in models]
    chunks += [_step(settings, most, model, "fp32", 2) for model in models]
    return chunks + [_step(settings, most, model, "bf16, offload", 1) for model in models]


def _step(settings: Settings, size: int, model: str, precision: str, num_turns: int) -> Chunk:
    from spec_tools.gpu.steps import estimate  # here, because it imports the package

    # One contender can hang, and the others still run.
    arguments = {"num_ranks": size, "size": model, "precision": precision, "num_turns": num_turns}
    name = f"steps/{size}-ranks/{model}, {precision}"
    chunk = _piece(name, settings, settings.limit, **arguments, hang_limit=settings.limit / 5)
    return replace(chunk, estimate=estimate(size, model, precision, num_turns))


def pytest_chunk(name: str, path: Path, settings: Settings, *options: str) -> Chunk:
    """A chunk that runs one test file."""
    words = [str(path), "--device", settings.platform.name, "-p", "spec_tools.gpu.note", "-q", "--tb=short", "-ra"]
    return Chunk(name, [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, *options], settings.limit)


def _suite(settings: Settings) -> list[Chunk]:
    tests = ROOT / "spec_tests"
    # Requirements about streams first, because only a GPU can prove them.
    paths = sorted(tests.rglob("test_*.py"), key=lambda path: ('"STREAM-' not in path.read_text(), path))
    names = [str(path.relative_to(tests)) for path in paths]
    chosen = [name for name in names if name in QUICK_FILES] if settings.quick else names
    return [pytest_chunk(f"suite/{name}", tests / name, settings) for name in chosen]


def _benchmarks(settings: Settings) -> list[Chunk]:
    options = ["-p", "spec_tools.gpu.note", *(["--quick"] if settings.quick else [])]
    return [Chunk("benchmarks/all", [sys.executable, "-m", "spec_tools.benchmarks", *options], BENCHMARKS_LIMIT)]


def _races(settings: Settings) -> list[Chunk]:
    from spec_tools.gpu.races import CONFIGURATIONS  # here, because it imports the package

    num_seeds = NUM_QUICK_SEEDS if settings.quick else NUM_SEEDS
    sizes = settings.platform.world_sizes()
    pairs = [(size, name) for size in sizes for name in CONFIGURATIONS]
    # Two replicas of two shards: four ranks, even if they share a device.
    pairs += [(4, name) for name in CONFIGURATIONS if "hybrid" in name.lower() and 4 not in sizes]
    return [_race(settings, size, name, num_seeds) for size, name in pairs]


def _race(settings: Settings, size: int, configuration: str, num_seeds: int) -> Chunk:
    # The limit for hanging ranks is shorter than that of the chunk, because the stacks of all ranks are more useful.
    arguments = {"configuration": configuration, "num_seeds": num_seeds, "hang_limit": settings.limit / 2}
    return _piece(f"races/{size}-ranks/{configuration}", settings, settings.limit, num_ranks=size, **arguments)


def _control(settings: Settings) -> list[Chunk]:
    from spec_tools.gpu.control import control_chunks  # here, because it imports this module

    return control_chunks(settings)


STAGES = (
    Stage("hardware", "what is there, and does each device work", _hardware, is_vital=True, layer="node"),
    Stage("first_step", "do both APIs train on all devices", _first_step),
    Stage("links", "do two ranks receive what the other sends", _links, is_vital=True, layer="links"),
    Stage("collectives", "do collectives work by themselves", _collectives, is_vital=True, layer="collectives"),
    Stage("smoke", "do both APIs train, and agree with a single process", _smoke, is_vital=True, layer="one step"),
    Stage("bandwidth", "how fast are all-gather and reduce-scatter, and are their values right", _bandwidth),
    Stage("steps", "do losses agree with torch's, and how long does a step take", _steps),
    Stage("suite", "the tests of the spec", _suite),
    Stage("races", "do the bits stay the same when streams are delayed", _races),
    Stage("control", "do failed tests fail alone too, and with torch's fsdp", _control),
    # Last, because it takes long and measures the CPU.
    Stage("benchmarks", "beside torch's own FSDPs", _benchmarks),
)
