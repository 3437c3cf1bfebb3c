"""The section "Remove one line": replays of a step without one wait, hook, free or limit.

``docs/data/counterfactual.json`` has the replays (``spec_tools/breaks/counterfactuals.py``). The page contains a
text for each removed line. The script `DATA` has the boxes of the pictures, which ``docs/assets/js/counterfactual.js``
draws. Without JavaScript, all texts are visible::

    forward-does-not-wait
      text      Without this line: forward waits for its all-gather. ...
      early     F0 (mm) reads bytes 0 to 256 before AG0 (all_gather_single) writes them.
      result    After the step, 48 of 48 elements of the rank's parameters are wrong.
      notices   Detected by the race checker, in the program flat_full: RACE: read of bytes 100 to 120 ...
"""

import json
from typing import Any

from docs_build.pages.modulepage import row_address
from docs_build.reading.text import words_of
from docs_build.recording.records import load
from docs_build.templates import PAGES

DATA = "assets/counterfactuals.js"  # path of the output of `script`
GROUPS = {"wait": "A wait", "free": "A free, or what protects it", "hook": "A hook", "limit": "A limit"}
BY = {"collision": "the race checker"}
DRAWN = ("boxes", "frees", "race", "peak")


def section(start: str) -> str:
    """The texts of all removed lines on the page ``start``, as HTML."""
    record = load("counterfactual")
    entries = [
        (
            one,
            early(one),
            row_address(start, one["file"], one["function"]),
            record["intact"][one["model"]],
            notices(one["name"]),
        )
        for one in record["entries"]
    ]
    return PAGES.counterfactual(entries)


def script() -> str:
    """The script with the boxes of all replays."""
    record = load("counterfactual")
    entries = [
        {key: entry[key] for key in ("name", "title", "model", *DRAWN)}
        | {"group": GROUPS[entry["group"]], "early": early(entry)}
        for entry in record["entries"]
    ]
    intact = {model: {key: replay[key] for key in DRAWN} for model, replay in record["intact"].items()}
    data = json.dumps({"entries": entries, "intact": intact}, separators=(",", ":"))
    return f"window.minifsdpCounterfactuals = {data};\n"


def early(entry: dict[str, Any]) -> str:
    """The two operations that run in the wrong order; empty if there are none."""
    race = entry["race"]
    if race is None:
        return ""
    (new, verb, operator, low, high), (old, old_verb, old_operator, *_) = race["new"], race["old"]
    names = [entry["boxes"][place][0] for place in (new, old)]
    after = "before" if race["kind"] == "race" else "of reused memory before"
    return f"{names[0]} ({operator}) {verb} bytes {low} to {high} {after} {names[1]} ({old_operator}) {old_verb} them."


def notices(name: str) -> list[tuple[str, str]]:
    """The checks that fail without the line: words after "Detected by", and the report or an empty text.

    Raises:
        KeyError: neither record has the broken engine.
    """
    for row in load("stream-breaks"):
        if row["name"] == name:
            return [(f"{BY[row['by']]}, in the program {row['program']} of the stream tests:", row["report"])]
    red = load("mutants")["mutants"][name]["red"]
    tests = [(row, *words_of(test)) for row, test in red.items()]
    return [(f"the test of {row} in {file}: {words}.", "") for row, file, words in tests]
