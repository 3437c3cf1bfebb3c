"""Runs the checks of an exercise against a learner's file, in child processes that end afterwards.

1. The parent starts one process for each rank. It never imports the learner's file.
2. A child loads the file, and replaces functions of the package by those of the learner, in its own memory only.
3. It runs the checks in order, and writes a line to its record for each. It ends at the first one that fails.
4. The parent stops all children if one fails or the time limit has passed, and reports the first failure.

Worked example, the records of two ranks of an exercise with three checks; rank 1 fails in the second one::

    rank 0   passed 0                      (rank 0 waits for rank 1 in a collective, and is stopped)
    rank 1   passed 0, failed 1 "sum"

*In torch:* no such tool.

Spec: LEARN-03, LEARN-04, LEARN-06.
"""

import faulthandler
import inspect
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minifsdp_tools.learn.checking import NotMetError, expect, replace_everywhere
from minifsdp_tools.learn.exercises import Exercise, common_feedback


@dataclass(frozen=True)
class Verdict:
    """The result of all checks.

    Attributes:
        num_passed: number of checks that passed on all ranks, counted from the first one.
        entry: the text that explains the failure; ``None`` if all checks passed.
        text: this text with its values.
    """

    num_passed: int
    entry: str | None
    text: str


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
        expect(callable(function), "missing-function", name=name)
        # `engine.lifetime:RateLimiter` and `throttle`, or `engine.shards` and `shard_of`.
        owner_name, attribute = re.split(r"[.:](?=\w+$)", place)
        owner: Any = resolve_name(f"minifsdp.{owner_name}")
        original = getattr(owner, attribute)
        got, right = (_parameters(each) for each in (function, original))
        expect(
            _accepts(function, original), "signature", name=name, got=got, right=right
        )
        setattr(owner, attribute, function)
        replace_everywhere(original, function, ("minifsdp.", "minifsdp_tools."))


def _parameters(function: Any) -> str:
    """The parameters of a function, with defaults and without types."""
    parameters = inspect.signature(function).parameters.values()
    plain = [one.replace(annotation=one.empty) for one in parameters]
    return str(inspect.Signature(plain))[1:-1]


def _accepts(function: Any, original: Any) -> bool:
    """Whether each call that fits the original function also fits the learner's one."""
    parameters = inspect.signature(original).parameters.values()
    required = [one for one in parameters if one.default is one.empty]
    for some in (required, parameters):
        in_order = [one.name for one in some if one.kind is one.POSITIONAL_OR_KEYWORD]
        others = {one.name: None for one in some if one.kind is one.KEYWORD_ONLY}
        try:
            inspect.signature(function).bind(*in_order, **others)
            inspect.signature(function).bind(**dict.fromkeys(in_order), **others)
        except TypeError:
            return False
    return True


def run_rank(
    exercise: Exercise, path: Path | None, rank: int, folder: Path, seconds: float
) -> None:
    """3. Runs the checks in this process. Ends the process."""
    # Memory that `torch.empty` returns then contains NaN, and not by chance the right values.
    # The public function also imports the compiler, which takes seconds.
    torch._C._set_deterministic_algorithms(True)
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.dump_traceback_later(seconds, file=stack)
    number = -1
    failed = False
    with (folder / f"{rank}.record").open("w", buffering=1) as record:
        try:
            functions = functions_of(exercise)
            if path is not None:
                replace(exercise.places, load(path))
            store = f"file://{folder}/store"
            limit = timedelta(seconds=seconds + 60)
            dist.init_process_group(
                "gloo",
                init_method=store,
                rank=rank,
                world_size=exercise.num_ranks,
                timeout=limit,
            )
            # A rank that ends while another one still connects would make gloo print an error.
            dist.barrier()
            for number, function in enumerate(functions):
                function()
                record.write(json.dumps({"passed": number}) + "\n")
            dist.barrier()
        except BaseException as error:
            failed = True
            entry, values = _explained(error, path)
            line = {
                "failed": max(number, 0),
                "entry": entry,
                "values": values,
                "time": time.monotonic(),
                "rank": rank,
            }
            record.write(json.dumps(line, default=str) + "\n")
    sys.stdout.flush()
    os._exit(failed)


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
    mine = [
        frame for frame in frames if path is not None and frame.filename == str(path)
    ]
    what = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return "syntax", {"error": what, "line": error.lineno}
    if mine and what == "NotImplementedError":
        return "not-written", {"name": mine[-1].name, "line": mine[-1].lineno}
    if mine:
        return "raised", {"error": what, "line": mine[-1].lineno, "code": mine[-1].line}
    where = (
        ""
        if not frames
        else f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
    )
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [
            (exercise, path and path.resolve(), rank, folder, seconds)
            for rank in range(exercise.num_ranks)
        ]
        children = [
            context.Process(target=run_rank, args=each, daemon=True)
            for each in arguments
        ]
        for child in children:
            child.start()
        in_time = _wait(children, time.monotonic() + seconds + 1)
        for child in children:
            child.kill()
            child.join()
        lines = [_read(folder / f"{rank}.record") for rank in range(exercise.num_ranks)]
        num_passed = min(sum("passed" in line for line in of_rank) for of_rank in lines)
        failures = sorted(
            (one for of_rank in lines for one in of_rank if "failed" in one),
            key=lambda one: one["time"],
        )
        texts = {**common_feedback(), **exercise.feedback}
        if failures:
            first = failures[0]
            text = texts[first["entry"]].strip().format(**first["values"])
            # A text about a rank names it already.
            text += (
                ""
                if "rank" in first["values"]
                else f" (Found on rank {first['rank']}.)"
            )
            return Verdict(first["failed"], first["entry"], text)
        if not in_time:
            where = "; ".join(
                _position(folder / f"{rank}.stack", path, rank)
                for rank in range(exercise.num_ranks)
            )
            return Verdict(
                num_passed,
                "time-limit",
                texts["time-limit"].strip().format(seconds=seconds, where=where),
            )
        if num_passed < len(exercise.checks):
            return Verdict(num_passed, "ended", texts["ended"].strip())
        return Verdict(num_passed, None, "")


def _wait(children: list[ForkProcess], deadline: float) -> bool:
    """4. Waits until all children have ended or one has failed. Returns whether this was before the deadline."""
    while time.monotonic() < deadline:
        codes = [child.exitcode for child in children]
        if any(codes) or None not in codes:
            return True
        time.sleep(0.02)
    return False


def _read(path: Path) -> list[dict[str, Any]]:
    # A rank that was stopped may not have written its last line completely.
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _position(stack: Path, path: Path | None, rank: int) -> str:
    """The innermost line of the learner's file that a rank was executing, in words."""
    pattern = rf'File "{re.escape(str(path and path.resolve()))}", line (\d+)'
    found = re.search(pattern, stack.read_text() if stack.exists() else "")
    return (
        f"rank {rank} was in line {found[1]} of your file"
        if found
        else f"rank {rank} was not inside your file"
    )
