"""The recorded runs as scripts for the step player.

A page opened from a disk cannot fetch files, but it can load scripts. So each run is a script that calls one function
with the data. The player adds a ``<script>`` for the selected run, and one for the running functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from docs_build.running import function_lines, line_of, only_records
from docs_build.verbs import frame_address

__all__ = ["script_of", "source_script"]

PAGE = "tools/player.html"
PHASES = {"IDLE": "i", "FORWARD": "f", "PRE_BACKWARD": "b", "POST_BACKWARD": "p", "SUMMONED": "s"}


def script_of(run: dict[str, Any]) -> str:
    """The script of one run."""
    names = [unit["name"] for unit in run["units"]]
    stacks: dict[str, int] = {}
    shown: list[Any] = []
    ranks = []
    for rank in run["ranks"]:
        moments = []
        for kind, unit, begins, ms, num_bytes, group, stack, held, optimizer in rank["moments"]:
            # Memory is freed before the event is recorded.
            frames = [_frame(f, has_ended=not begins or kind == "FREE") for f in stack if not only_records(*f[:2])]
            number = stacks.setdefault(json.dumps(frames), len(stacks))
            if number == len(shown):
                shown.append(frames)
            moments.append(
                [
                    kind,
                    -1 if kind == "STEP" else names.index(unit),
                    int(begins),
                    round(ms, 3),
                    num_bytes,
                    group,
                    number,
                    "".join(h[0] for h in held),
                    "".join(PHASES[h[1]] for h in held),
                    [h[2] for h in held],
                    optimizer,
                    [h[3] for h in held],
                ]
            )
        ranks.append(moments)
    pieces = [rank["pieces"] for rank in run["ranks"]]
    data = {"units": run["units"], "stacks": shown, "ranks": ranks, "pieces": pieces, "run": run["run"]}
    return f"minifsdpRun({json.dumps(run['key'])},{json.dumps(data, separators=(',', ':'))});\n"


def source_script(runs: Iterable[dict[str, Any]]) -> str:
    """The script with all functions of all runs: file, name, line numbers and HTML."""
    frames = {tuple(f[:2]) for run in runs for rank in run["ranks"] for m in rank["moments"] for f in m[6]}
    functions: dict[str, dict[str, Any]] = {}
    for name, qualified in sorted(frames):
        outer = qualified.partition(".<locals>")[0]
        functions.setdefault(name, {})[outer] = function_lines(name, outer)
    return f"minifsdpSource({json.dumps(functions, separators=(',', ':'))});\n"


def _frame(frame: list[Any], *, has_ended: bool) -> list[Any]:
    """Name, file, anchor, whether it is a hook registered by the named function, and line number."""
    name, qualified, _, text = frame
    outer, inner, _ = str(qualified).partition(".<locals>")
    line = line_of(name, qualified, text, has_ended=has_ended)
    return [outer, name, frame_address(frame, PAGE), int(bool(inner)), line]
