"""The recorded runs as scripts for the step player.

A page that was opened from a disk may not fetch files, but it may load scripts. So each run is a script that calls one
function with the data; the player adds a ``<script>`` for the run that was chosen.
"""

from __future__ import annotations

import json
from typing import Any

from docs_build.verbs import frame_address

__all__ = ["script_of"]

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
            number = stacks.setdefault(json.dumps(stack), len(stacks))
            if number == len(shown):
                shown.append([_frame(f) for f in stack if f[1] != "_traced"])
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
                ]
            )
        ranks.append(moments)
    data = {"units": run["units"], "stacks": shown, "ranks": ranks, "run": run["run"]}
    return f"minifsdpRun({json.dumps(run['key'])},{json.dumps(data, separators=(',', ':'))});\n"


def _frame(frame: list[Any]) -> list[Any]:
    """Name, file, address; and whether it is a hook that the named function has laid."""
    outer, inner, _ = str(frame[1]).partition(".<locals>")
    return [outer, frame[0], frame_address(frame, PAGE), int(bool(inner))]
