"""The result of a simulation as a table, as one JSON line, and as a picture.

Worked example, a line of the table: 128 ranks, a step of 2.41 s, of which 0.03 s are exposed communication::

    fsdp2 FULL_SHARD          2.406 s     1.3 %    6 809    39.9 %    59.2 GiB

*In torch:* nothing comparable.

Spec: SIMULATE-13.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from minifsdp_tools import timeline
from minifsdp_tools.simulate.machine import Card
from minifsdp_tools.simulate.replay import Result
from minifsdp_tools.simulate.setup import HYBRID, Setup

COLUMNS = (
    "setting",
    "step",
    "exposed",
    "tokens/s/rank",
    "MFU",
    "HFU",
    "peak",
    "limited by",
)
GIB = 2**30
# The rest of a card's memory is used by its driver, by libraries, and by gaps between blocks.
USABLE = 0.92


def limit_of(setup: Setup, card: Card, result: Result) -> str:
    """The resource that limits the speed of a setting, or that it has too little of."""
    usable = USABLE * card.memory
    if result.peak_held > usable:
        return f"memory: does not fit, needs {result.peak_held / GIB:.1f} of {usable / GIB:.1f} GiB"
    if result.host_seconds > 0.9 * result.seconds:
        return "CPU: the thread that issues kernels is always busy"
    share = result.exposed_seconds / result.seconds
    if share > 0.1:
        return f"network: computation waits {share:.0%} of the step for it"
    if setup.checkpointing != "none":
        return f"compute: of which {max(0.0, 1 - result.mfu / result.hfu):.0%} is recomputation"
    return "compute"


def name_of(setup: Setup) -> str:
    """The options of a setting that differ from those of other settings of the same model."""
    parts = {
        setup.api: True,
        setup.strategy: True,
        f"{setup.shards} shards": setup.strategy in HYBRID,
        f"{setup.unit} blocks per unit": setup.unit > 1,
        f"micro-batch {setup.micro_batch}": True,
        f"checkpointing {setup.checkpointing}": setup.checkpointing != "none",
        f"prefetch {setup.backward_prefetch}": setup.backward_prefetch
        != "BACKWARD_PRE",
    }
    return ", ".join(part for part, is_shown in parts.items() if is_shown)


def table(runs: Iterable[tuple[Setup, Result]], card: Card) -> str:
    """A table with a line for each run."""
    rows = (
        (
            name_of(setup),
            f"{result.seconds:.3f} s",
            f"{result.exposed_seconds / result.seconds:.1%}",
            f"{result.tokens_per_second:.0f}",
            f"{result.mfu:.1%}",
            f"{result.hfu:.1%}",
            f"{result.peak_held / GIB:.2f} GiB",
            limit_of(setup, card, result),
        )
        for setup, result in runs
    )
    lines = [COLUMNS, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in padded)


def json_line(setup: Setup, card: Card, result: Result) -> str:
    """The setting, the card and the figures of a run as one line of JSON, without events."""
    figures: dict[str, Any] = asdict(result)
    del figures["events"], figures["memory"]
    return json.dumps(
        {
            "setup": asdict(setup),
            "card": asdict(card),
            **figures,
            "limit": limit_of(setup, card, result),
        }
    )


def picture(setup: Setup, result: Result) -> str:
    """The engine's events at their simulated times, as an SVG."""
    return timeline.svg(
        [sorted(result.events, key=lambda event: event.start)],
        title=f"Simulated step of rank 0 of {setup.num_ranks}: {name_of(setup)}",
    )
