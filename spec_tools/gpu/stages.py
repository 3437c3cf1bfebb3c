"""The table of stages: a question, a share of the time, and the tasks or tests that answer the question."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spec_tools.gpu.collectives import COLLECTIVES, SHARED_SIZES, SIZES
from spec_tools.gpu.races import CONFIGURATIONS
from spec_tools.gpu.steps import APIS, MODELS

NUM_SEEDS = 12
Tasks = dict[str, dict[str, Any]]  # the arguments of each task
Limits = list[tuple[str, float]]  # stages, each with the moment of its end


@dataclass(frozen=True)
class Stage:
    """A question.

    Attributes:
        question: what the stage answers.
        share: its part of the time in twelfths. A stage also gets what earlier ones leave.
        row: the requirement that its tasks show.
        tasks: makes the tasks for a type of device and a number of devices; None for tests.
    """

    question: str
    share: float
    row: str = ""
    tasks: Callable[[str, int], Tasks] | None = None


def sizes(num_devices: int) -> list[int]:
    """Numbers of ranks: 2, and 4 and 8 if there are enough devices. If there is only one, two ranks share it."""
    return [2, *(size for size in (4, 8) if size <= num_devices)]


def _hardware(device: str, num_devices: int) -> Tasks:
    # "devices" starts 1 rank. The fork server of the ranks imports torch during "process".
    return {what: {"what": what} for what in ("process", "devices", "2 ranks", "4 ranks")}


def _collectives(device: str, num_devices: int) -> Tasks:
    found: Tasks = {}
    for num_ranks, collective in itertools.product(sizes(num_devices), COLLECTIVES):
        shared = num_ranks > num_devices
        for size in SHARED_SIZES if shared else SIZES:
            arguments = {"num_ranks": num_ranks, "shared": shared, "collective": collective, "size": size}
            found[f"{num_ranks} {collective} {size}"] = arguments
    return found


def _steps(device: str, num_devices: int) -> Tasks:
    models = [model for model in MODELS if (model == "tiny") != (device == "cuda")]
    # One rank has no communication, so it shows what the host does. More ranks only if each has a device.
    numbers = [1, *sizes(num_devices)[-1:]] if num_devices > 1 else [1]
    return {
        f"{num_ranks} {model} {api}": {"num_ranks": num_ranks, "model": model, "api": api}
        for model, num_ranks, api in itertools.product(models, numbers, APIS)
    }


def _races(device: str, num_devices: int) -> Tasks:
    # Other devices have no delays, so they only show that the stage runs.
    configurations = list(CONFIGURATIONS) if device == "cuda" else ["wrapper", "function, hybrid"]
    num_seeds = NUM_SEEDS if device == "cuda" else 1
    # Two replicas of two shards need four ranks, even if they share a device.
    numbers = {4, sizes(num_devices)[-1]} - {2}
    return {
        f"{num_ranks} {name}": {"num_ranks": num_ranks, "num_seeds": num_seeds, "configuration": name}
        for num_ranks, name in itertools.product(sorted(numbers), configurations)
    }


STAGES = {
    "hardware": Stage("which devices there are, and how long ranks take to start", 0.5, "KIT-10", _hardware),
    "collectives": Stage("are all-gather and reduce-scatter right, and how fast", 0.25, "KIT-16", _collectives),
    "smoke": Stage("does each kind of step agree with a single process and with torch", 0.25),
    "unexplained": Stage("do tests fail again that failed on a GPU without a known cause", 1),
    "requirements": Stage("does a test of each requirement pass", 6),
    "steps": Stage("how long does a step take beside torch's, and do the losses agree", 2, "KIT-09", _steps),
    "races": Stage("do the bits stay the same when streams are delayed", 1, "KIT-06", _races),
    "variants": Stage("do the other tests and variants pass", 1),
}


def limits(names: Sequence[str], begin: float, end: float) -> Limits:
    """The stages, each with the moment of its end; then all of them again, because some may not be complete.

    So the last one, ``variants``, runs after the others are complete.
    """
    total = sum(STAGES[name].share for name in names)
    shares = itertools.accumulate(STAGES[name].share for name in names)
    moments = [begin + (end - begin) * share / total for share in shares]
    first = [(name, until) for name, until in zip(names, moments, strict=True) if name != "variants"]
    return first + [(name, end) for name in names]
