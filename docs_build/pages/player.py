"""The recorded runs as scripts for the step player.

A page opened from a disk cannot fetch files, but it can load scripts. So each run is a script that calls one function
with the data. The player adds a ``<script>`` for the selected run, and one for the running functions.
"""

import json
from collections.abc import Iterable
from typing import Any

from docs_build.pages.modulepage import row_address
from docs_build.reading.markup import highlight_lines
from docs_build.reading.running import line_of, lines_of, only_records
from docs_build.reading.source import read_module
from docs_build.recording.recordings import load

PAGE = "tools/player.html"
PHASES = {"IDLE": "i", "FORWARD": "f", "PRE_BACKWARD": "b", "POST_BACKWARD": "p", "SUMMONED": "s"}


def script_of(run: dict[str, Any]) -> str:
    """The script of one run."""
    names = [unit["name"] for unit in run["units"]]
    stacks: dict[str, int] = {}
    ranks = []
    for rank in run["ranks"]:
        moments = []
        for kind, unit, begins, ms, num_bytes, group, stack, held, optimizer in rank["moments"]:
            # Memory is freed before the event is recorded.
            frames = [_frame(f, has_ended=not begins or kind == "FREE") for f in stack if not only_records(*f[:2])]
            place = -1 if kind == "STEP" else names.index(unit)
            states, phases, reduced, unsharded = zip(*held, strict=True)
            words = ["".join(state[0] for state in states), "".join(PHASES[phase] for phase in phases)]
            number = stacks.setdefault(json.dumps(frames), len(stacks))
            first = [kind, place, int(begins), round(ms, 3), num_bytes, group, number]
            moments.append([*first, *words, reduced, optimizer, unsharded])
        ranks.append(moments)
    pieces, shown = [rank["pieces"] for rank in run["ranks"]], [json.loads(stack) for stack in stacks]
    data = {"units": run["units"], "stacks": shown, "ranks": ranks, "pieces": pieces, "run": run["run"]}
    return f"minifsdpRun({json.dumps(run['key'])},{json.dumps(data, separators=(',', ':'))});\n"


def source_script(runs: Iterable[dict[str, Any]]) -> str:
    """The script with all functions of all runs: file, name, line numbers and HTML."""
    frames = {tuple(f[:2]) for run in runs for rank in run["ranks"] for m in rank["moments"] for f in m[6]}
    functions: dict[str, dict[str, Any]] = {}
    code = {name: highlight_lines(read_module(name).text) for name, _ in frames}
    for name, qualified in sorted(frames):
        outer = qualified.partition(".<locals>")[0]
        functions.setdefault(name, {})[outer] = [(number, code[name][number - 1]) for number in lines_of(name, outer)]
    return f"minifsdpSource({json.dumps(functions, separators=(',', ':'))});\n"


def _frame(frame: list[str], *, has_ended: bool) -> list[Any]:
    """Name, file, anchor, whether it is a hook registered by the named function, and line number."""
    name, qualified, anchor, text = frame
    outer, inner, _ = qualified.partition(".<locals>")
    line = line_of(name, qualified, text, has_ended=has_ended)
    return [outer, name, row_address(PAGE, name, anchor), int(bool(inner)), line]


def scripts() -> dict[str, str]:
    """All scripts: one for each run, one with the names of all, and one with their functions."""
    runs = {key: run for key, run in load()["runs"].items() if run["run"]["width"] <= 64}
    return {
        "runs.js": f"window.minifsdpRuns = {json.dumps(sorted(runs))};\n",
        "source.js": source_script(runs.values()),
        **{f"{key}.js": script_of(run) for key, run in runs.items()},
    }
