"""Tests of the race checker: broken engines, and a program that detects each of them.

If a race checker reports nothing, it can be correct or defective. So the engine is broken on purpose: each wait, hold,
follow, ``record_stream``, copy and stream of the package is removed or moved, one at a time, and a small program runs
on the result. The breaks are data, in ``broken/``::

    Break(
        "no-record-stream",
        "The allocator reuses memory that the compute stream still reads.",
        remove("release", "storage_owner.record_stream(compute_stream)"),       see ``harness/edit.py``
        "flat_full",                                                            the program
        "collision",                                                            how it is found
    )

The ways in which a break is found:

================  ==============================================================================================
``collision``     the race checker reports a race
``exception``     the program does not finish
``wrong values``  the results differ from those of the intact engine, even in the order of the program
``stops``         correct values, but the CPU is stopped more often or less often
``peak``          correct values, but more memory
``overlap``       correct values, but fewer collectives may overlap computations
================  ==============================================================================================

Most collisions also change results in a replay; the table shows in how many of the sampled schedules. If a break is not
found, the checker has a defect, a program is missing, or the line is not necessary.

If a refactoring of the engine changes such a line, a test fails, because the edit does not fit. The break must then be
rewritten for the new engine.

``python -m spec_tools.stream_breaks.breaks`` writes the table ``docs/data/stream-breaks.json`` in about two minutes.

Spec: SIM-07.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spec_tests.harness.accounting import ROOT
from spec_tests.streams import engines
from spec_tests.streams.engines import PACKAGE, Break
from spec_tools.stream_breaks.broken import failures, gathers, host, memory, reductions

__all__ = ["BREAKS", "SCHEDULES", "unbroken"]

BREAKS = {
    one.name: one for one in [*gathers.BREAKS, *reductions.BREAKS, *memory.BREAKS, *host.BREAKS, *failures.BREAKS]
}

SCHEDULES = 8  # number of other orders that are tried for each program

TABLE = ROOT / "docs" / "data" / "stream-breaks.json"

# Breaks that violate a requirement: the requirement is tested because these breaks are found.
ROWS = {
    "GRAD-05": ("memory-of-a-failed-hook-reused",),
    "LEDGER-21": ("query-invalidates-a-capture",),
    "LEDGER-22": ("optimizer-steps-after-an-abort",),
    "STREAM-01": ("collective-returns-nothing",),
    "STREAM-02": ("work-not-waited-for", "work-waited-for-too-late", "all-reduce-not-waited-for"),
    "STREAM-03": (
        "reduction-not-waited-for",
        "hook-not-waited-for",
    ),
    "STREAM-04": (
        "only-groups-promise-flat",
        "only-groups-promise-row",
        "only-groups-promise-extension",
        "buffer-given-back-at-once",
    ),
    "STREAM-05": (
        "new-data-not-followed",
        "assigned-data-not-followed",
        "always-follows",
    ),
    "STREAM-06": ("partial-sum-dropped",),
    "STREAM-07": ("stream-of-another-device", "current-stream-of-another-device", "another-device-synchronized"),
    "STREAM-08": ("gradient-assigned-across-devices",),
    "STREAM-15": (
        "shards-given-back-while-they-are-copied",
        "prefetched-in-vain-and-not-waited-for",
        "optimizer-writes-while-gathers-read",
        "optimizer-writes-while-gathers-read-forward",
    ),
    "STREAM-16": (
        "steps-while-gathers-read",
        "steps-on-the-cpu-while-gathers-read",
        "stepped-in-backward-not-followed",
    ),
}

# Lines that order something on streams.
ORDERS = re.compile(
    r"\.(wait|wait_event|wait_stream|wait_compute|record_stream|record_event|synchronize|handle)\(|\.join\(\)"
    "|non_blocking="
)
# Lines without a break, and the reasons.
LEFT_OUT = {
    "batches.py: work.wait(": "an accelerator sends on a stream of its own, and only CPUs have something to wait for",
    "batches.py: collectives.all_reduce(ranks, total": "an accelerator sends on the stream that reads",
    "checkpoint/tensors.py: collectives.all_gather(": "loading a sharded state dict begins with a barrier of all ranks",
    "checkpoint/codec.py: collectives.all_gather(": "the optimizer's state begins with a barrier of all ranks",
    "cases/written_weights.py: collectives.all_gather(": "the hashes of fake ranks differ, which is an error",
    "engine/reduce.py: comm_stream.wait_compute(": "after an exception of a hook, tested by GRAD-05",
    "fsdp1/wrapper.py: initial.synchronize(": "has nothing to do with streams",
    "watchdog/": "a thread that has nothing to do with streams",
    "debugging/values.py: collectives.all_reduce(": "is off, and stops the CPU on purpose",
    "checks/rank_checks.py: arrived = events.last_event = ": "only lets `reduced` use `synchronize` later",
    "checks/rank_checks.py: arrived.synchronize(": "a whole backward runs between the all-gather and this line",
    "checks/rank_checks.py: asked[-1].wait(": "a stream has waited already, and a CPU needs no order",
    "engine/root.py: comm_stream.join(": "streams are replaced between iterations, which no program here does",
    "cases/manual_finalization.py: handle.wait(": "calls a method that does not use streams itself",
    "fsdp2/module.py: handle.wait(": "a line of a docstring",
    "engine/exchange.py: events.collective(function.__name__": "the called function has waited",
}


def unbroken() -> list[str]:
    """Lines of the package that order something on streams, no break changes, and are not in `LEFT_OUT`.

    Raises:
        ValueError: the edit of a break cannot be applied.
    """
    edits = [one.edit.apply(PACKAGE) for one in BREAKS.values()]
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        lines, file = ast.unparse(ast.parse(path.read_text())).splitlines(), path.relative_to(PACKAGE).as_posix()
        broken = {place for edit in edits if edit.path == path for place in _changed(lines, edit.text.splitlines())}
        found += [
            f"{file}: {line.strip()}" for place, line in enumerate(lines) if ORDERS.search(line) and place not in broken
        ]
    return [line for line in found if not line.startswith(tuple(LEFT_OUT))]


def _changed(before: list[str], after: list[str]) -> Iterator[int]:
    """The places of the lines that are changed or removed."""
    for kind, start, end, *_ in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            yield from range(start, end)


def _row(one: Break) -> dict[str, Any]:
    """The entry of a break in the table."""
    intact = engines.run(one.program)
    with engines.broken(one) as folder:
        found = engines.findings(engines.run(one.program, folder, SCHEDULES), intact)
    first_line = found.get(one.by, "NOT FOUND").splitlines()[0]
    file = one.edit.apply(PACKAGE).path.relative_to(PACKAGE).as_posix()
    row = {"name": one.name, "what": one.what, "file": file, "program": one.program, "by": one.by}
    return {**row, "report": first_line, "replay": found.get("other bits", "")}


def main() -> None:
    """Writes the table."""
    with ThreadPoolExecutor(2) as executor:
        rows = list(executor.map(_row, BREAKS.values()))
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} breaks, not found: {[row['name'] for row in rows if row['report'] == 'NOT FOUND']}")


if __name__ == "__main__":
    main()
