"""The table of the layouts' methods from ``verbs.toml``, and the path of one parameter through one training step."""

import tomllib
from pathlib import Path

from docs_build.pages.fragments import fragment
from docs_build.pages.modulepage import address, row_address
from docs_build.reading.running import only_records
from docs_build.reading.source import find_function
from docs_build.recording.recordings import find
from docs_build.templates import PAGES

# The interface, and both layouts.
LAYOUT = ("engine/layout.py", "Layout")
OWNERS = (LAYOUT, ("engine/flat.py", "FlatLayout"), ("engine/per_param.py", "PerParameterLayout"))


def verb_table(start: str) -> str:
    """Every method of the layout interface in a row, with links to both layouts and their code below.

    Raises:
        KeyError: a method is not in the interface, so the table is out of date.
    """
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["operation"]
    return PAGES.verbs(
        [(row, [[_place(owner, method, start) for method in row["methods"]] for owner in OWNERS]) for row in rows]
    )


def _place(owner: tuple[str, str], method: str, start: str) -> tuple[str, str, str]:
    """Address, name and code of a layout's method, or of the interface's default."""
    name, qualified = owner[0], f"{owner[1]}.{method}"
    try:
        find_function(name, qualified)
    except KeyError:
        if owner == LAYOUT:
            raise
        return _place(LAYOUT, method, start)
    return address(start, name, qualified), method, fragment(name, qualified, start)


# --- the path of one parameter ---

UNIT = "stage0.block1"
WORDS = {
    ("AG", True): "its all-gather is issued",
    ("AG", False): "its unit waits for the all-gather",
    ("F", True): "it is registered on its module, and forward runs",
    ("F", False): "the forward of its unit is complete",
    ("FREE", True): "its unsharded memory is freed",
    ("B", True): "the gradient of its unit's output has arrived",
    ("B", False): "the gradient of the unit is complete",
    ("RS", True): "its gradient is packed, and the reduce-scatter is issued",
    ("RS", False): "this rank's shard of the mean gradient is stored",
    ("STEP", True): "the optimizer updates this rank's shard",
}
STATES = {"S": "SHARDED", "G": "GATHERING", "U": "UNSHARDED"}


def call_path(start: str) -> str:
    """One parameter through one recorded step: each moment with the functions that ran, the innermost first."""
    run = find("fsdp2-full-pre-block-2")
    place = [one["name"] for one in run["units"]].index(UNIT)
    shown = []
    for kind, unit, begins, milliseconds, num_bytes, _, stack, held, _ in run["ranks"][0]["moments"]:
        if (unit == UNIT or kind == "STEP") and (kind, begins) in WORDS:
            state, phase, gradient, _ = held[place]
            # Functions that only record the event are not part of the path.
            running = [(name, *code.partition(".<locals>")) for name, code, *_ in stack if not only_records(name, code)]
            # A function with an inner one has returned, and its hook is running.
            frames = [(row_address(start, name, outer), outer, bool(inner)) for name, outer, inner, _ in running]
            shown.append((milliseconds, kind, WORDS[kind, begins], num_bytes, frames, STATES[state], phase, gradient))
    return PAGES.path(shown)
