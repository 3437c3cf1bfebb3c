"""Runs the checks of an exercise against a learner's file, in child processes that end afterwards.

1. The parent starts one process for each rank. It never imports the learner's file.
2. A child loads the file, and replaces functions of the package by those of the learner, in its own memory only.
3. It runs the checks in order, and reports each result to the parent. It ends at the first check that fails.
4. The parent stops all children if one fails or the time limit has passed, and returns the first failure.

Worked example, the reports of two ranks of an exercise with three checks; rank 1 fails in the second one::

    rank 0   Verdict(1)                    (rank 0 waits for rank 1 in a collective, and is stopped)
    rank 1   Verdict(1), Verdict(1, "sum", "Rank 1 gave ...")

*In torch:* no such tool.

Spec: LEARN-03, LEARN-04, LEARN-06.
"""

import faulthandler
import inspect
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minifsdp_tools.learn.checking import NotMetError, expect, replace_everywhere
from minifsdp_tools.learn.exercises import Exercise


@dataclass(frozen=True)
class Verdict:
    """The result of the checks.

    Attributes:
        num_passed: number of checks that passed on all ranks, counted from the first one.
        entry: the text that explains the failure; ``None`` without a failure.
        text: this text with its values.
    """

    num_passed: int
    entry: str | None = None
    text: str = ""


# --- the child ---


def load(path: Path) -> ModuleType:
    """Executes the learner's file as a module, under a name that no other module has.

    An import would use the bytecode of an earlier file with the same size that was written in the same second.
    """
    module = ModuleType("minifsdp_learner_file")
    module.__file__ = str(path)
    # `dataclasses` and `recorded_collectives` look it up.
    sys.modules[module.__name__] = module
    # As bytes, so that Python reads the encoding of the file, as for any other file.
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return module


def replace(places: dict[str, str], learner: ModuleType) -> None:
    """2. Replaces functions of the package in this process."""
    for name, place in places.items():
        function: Any = getattr(learner, name, None)
        expect({"missing-function": callable(function)}, name=name)
        # `engine.lifetime:RateLimiter` and `throttle`, or `engine.shards` and `shard_of`.
        owner_name, attribute = re.split(r"[.:](?=\w+$)", place)
        owner: Any = resolve_name(f"minifsdp.{owner_name}")
        original = getattr(owner, attribute)
        got, right = (_parameters(each) for each in (function, original))
        expect({"signature": got == right}, name=name, got=got, right=right)
        setattr(owner, attribute, function)
        replace_everywhere(original, function, ("minifsdp.", "minifsdp_tools."))


def _parameters(function: Any) -> str:
    """The parameters of a function, with defaults and without types."""
    plain = [
        one.replace(annotation=one.empty)
        for one in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(plain))[1:-1]


def run_rank(
    rank: int,
    exercise: Exercise,
    path: Path | None,
    folder: Path,
    seconds: float,
    reports: Any,
) -> None:
    """3. Runs the checks in this process. Ends the process."""
    # Memory that `torch.empty` returns then contains NaN, and not by chance the right values.
    # The public function also imports the compiler, which takes seconds.
    torch._C._set_deterministic_algorithms(True)
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.dump_traceback_later(seconds, file=stack)
    num_passed = 0
    try:
        if path is not None:
            replace(exercise.places, load(path))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=exercise.num_ranks,
            timeout=timedelta(seconds=seconds + 60),
        )
        # A rank that ends while another one still connects would make gloo print an error.
        dist.barrier()
        for function in functions_of(exercise):
            function()
            num_passed += 1
            reports.put((rank, Verdict(num_passed)))
        dist.barrier()
    except BaseException as error:
        entry, values = _explained(error, path)
        text = exercise.text_of(entry)
        # A text about a rank names it already.
        found = "" if "{rank}" in text else f" (Found on rank {rank}.)"
        reports.put((rank, Verdict(num_passed, entry, text.format(**values) + found)))
    sys.stdout.flush()
    os._exit(0)


def functions_of(exercise: Exercise) -> list[Any]:
    """The functions that check the exercise."""
    return [
        resolve_name(f"minifsdp_tools.learn.{check.function}")
        for check in exercise.checks
    ]


def _explained(
    error: BaseException, path: Path | None
) -> tuple[str, dict[str, object]]:
    """The entry of an exception, and values for its text."""
    if isinstance(error, NotMetError):
        return error.entry, error.values
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if frame.filename == str(path)]
    what = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return "syntax", {"error": what, "line": error.lineno}
    if mine and what == "NotImplementedError":
        return "not-written", {"name": mine[-1].name, "line": mine[-1].lineno}
    if mine:
        return "raised", {"error": what, "line": mine[-1].lineno, "code": mine[-1].line}
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
    return "raised-elsewhere", {"error": what, "where": where}


# --- the parent ---


def grade(exercise: Exercise, path: Path | None, seconds: float = 60) -> Verdict:
    """Runs the checks of an exercise.

    Args:
        exercise: the exercise.
        path: the learner's file; ``None`` checks the functions of the package.
        seconds: the time limit.
    """
    # A fork does not import modules again. No thread of this process runs, and it has not run a backward.
    functions_of(exercise)
    context = multiprocessing.get_context("fork")
    reports = context.SimpleQueue()
    path = path and path.resolve()
    ranks = range(exercise.num_ranks)
    with tempfile.TemporaryDirectory() as name:
        arguments = (exercise, path, Path(name), seconds, reports)
        children = [
            context.Process(target=run_rank, args=(rank, *arguments), daemon=True)
            for rank in ranks
        ]
        for child in children:
            child.start()
        verdict = _wait(children, reports, time.monotonic() + seconds + 1)
        for child in children:
            child.kill()
            child.join()
        if verdict.text or verdict == Verdict(len(exercise.checks)):
            return verdict
        entry = verdict.entry or "ended"
        stacks = [Path(name) / f"{rank}.stack" for rank in ranks]
        where = "; ".join(_position(stack, path) for stack in stacks)
        return Verdict(
            verdict.num_passed,
            entry,
            exercise.text_of(entry).format(seconds=seconds, where=where),
        )


def _wait(children: Sequence[Any], reports: Any, deadline: float) -> Verdict:
    """4. Waits until all children have ended or one has failed, and returns the first failure."""
    passed = [0] * len(children)
    while time.monotonic() < deadline:
        # A process that has ended by now has put all its reports.
        codes = [child.exitcode for child in children]
        while not reports.empty():
            rank, verdict = reports.get()
            if verdict.entry is not None:
                return verdict  # type: ignore[no-any-return]
            passed[rank] = verdict.num_passed
        if any(codes) or None not in codes:
            return Verdict(min(passed))
        time.sleep(0.02)
    return Verdict(min(passed), "time-limit")


def _position(stack: Path, path: Path | None) -> str:
    """The innermost line of the learner's file that a rank was executing, in words."""
    pattern = rf'File "{re.escape(str(path))}", line (\d+)'
    found = re.search(pattern, stack.read_text() if stack.exists() else "")
    return f"rank {stack.stem} was " + (
        f"in line {found[1]} of your file" if found else "not inside your file"
    )
