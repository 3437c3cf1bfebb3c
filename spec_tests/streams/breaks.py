"""The checker is checked: more than a hundred broken engines, and a program for each that notices.

A race checker that says nothing may be right, or blind. So the engine is broken on purpose: each wait, hold, follow,
``record_stream``, copy and stream of the package is taken out or put in another place, one at a time, and a small
program is run on what is left. The breaks are data, in ``broken/``::

    Break("no-record-stream", "engine/lifetime.py",
          old="        storage_owner.record_stream(compute_stream)\\n",    exactly once in the file
          new="",
          what="The allocator is not told that the compute stream still reads.",
          program="flat_full", by="collision")

By what a break is found:

================  ==============================================================================================
``collision``     the race checker reports one
``exception``     the program does not come to its end
``wrong values``  the results differ from those of the intact engine already in the order of the program
``stops``         right values, but the CPU is stopped more often, or not where it should be
``peak``          right values, but more memory
``overlap``       right values, but fewer collectives may run beside computations
================  ==============================================================================================

Most collisions give other bits in a replay, too; the table says in how many schedules of those that were sampled. A
break that is not found means that the checker is blind, that a program is missing, or that the line is superfluous.

A refactoring of the engine that changes such a passage makes the test of its break fail, with the passage: it is to be
written anew for the new engine.

The table ``docs/data/stream-breaks.json`` is written by ``python -m spec_tests.streams.breaks``, in about two minutes.

Spec: SIM-07.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spec_tests.harness.accounting import ROOT
from spec_tests.streams import engines
from spec_tests.streams.broken import gathers, host, memory, reductions
from spec_tests.streams.engines import PACKAGE, Break

__all__ = ["BREAKS", "SCHEDULES", "unbroken"]

BREAKS = {one.name: one for one in [*gathers.BREAKS, *reductions.BREAKS, *memory.BREAKS, *host.BREAKS]}

SCHEDULES = 8  # other orders that are tried of each program

TABLE = ROOT / "docs" / "data" / "stream-breaks.json"

# Breaks that take away what a row of the spec promises: that they are found is what proves it.
ROWS = {
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
    r"\.(wait|wait_event|wait_stream|follow|record_stream|record_event|synchronize|promise)\(|\.join\(\)"
    "|non_blocking="
)
# Not broken, and why.
LEFT_OUT = {
    "batches.py: work.wait(": "an accelerator sends on the lane's own stream, and only CPUs have something to wait for",
    'batches.py: Collective("token_scale"': "an accelerator sends on the stream that reads",
    "checkpoint/chunks.py: collectives.gather(": "loading a sharded state dict begins with a barrier of all ranks",
    "checkpoint/codec.py: collectives.gather(": "the optimizer's state begins with a barrier of all ranks",
    "engine/gloo.py: work.wait(": "between CPUs alone",
    "engine/gloo.py: self._work.wait(": "between CPUs alone",
    "engine/gloo.py: exchange.wait(": "between CPUs alone",
    "engine/reduce.py: lane.join(": "after an exception of a hook, tested by GRAD-05",
    "engine/reduce.py: lane.follow(": "after an exception of a hook, tested by GRAD-05",
    "engine/gloo.py: self.all_gather_apart(": "between CPUs alone",
    "fsdp1/wrapper.py: initial.synchronize(": "has nothing to do with streams",
    "ledger/process.py: ": "a thread that has nothing to do with streams",
    "ledger/watcher.py: ": "a thread that has nothing to do with streams",
    "debugging/values.py: collectives.all_reduce(": "is off, and stops the CPU on purpose",
    "engine/comparison.py: self._arrived = ": "is asked whether it has come, and then nothing is left to be waited for",
    "engine/comparison.py: arrived.synchronize(": "a whole backward lies between the question and this",
    "engine/comparison.py: question.wait(": "a stream has waited already, and a CPU needs no order",
    "engine/collectives.py: Collective(function.__name__": "what it calls has waited by itself",
}


def unbroken() -> list[str]:
    """Lines of the package that order something on streams and are in no break's passage, without those left out."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text, file = path.read_text(), path.relative_to(PACKAGE).as_posix()
        passages = [(text.find(one.old), len(one.old)) for one in BREAKS.values() if one.file == file]
        for match in ORDERS.finditer(text):
            if not any(start <= match.start() < start + length for start, length in passages):
                line = text[text.rfind("\n", 0, match.start()) + 1 : text.find("\n", match.start())].strip()
                found.append(f"{file}: {line}")
    return [line for line in found if not line.startswith(tuple(LEFT_OUT))]


def _row(one: Break) -> dict[str, Any]:
    """What the table says of a break."""
    intact = engines.run(one.program)
    with engines.broken(one) as folder:
        found = engines.findings(engines.run(one.program, folder, SCHEDULES), intact)
    first_line = found.get(one.by, "NOT FOUND").splitlines()[0]
    row = {"name": one.name, "what": one.what, "file": one.file, "program": one.program, "by": one.by}
    return {**row, "report": first_line, "replay": found.get("other bits", "")}


def main() -> None:
    """Writes the table."""
    with ThreadPoolExecutor(2) as executor:
        rows = list(executor.map(_row, BREAKS.values()))
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} breaks, not found: {[row['name'] for row in rows if row['report'] == 'NOT FOUND']}")


if __name__ == "__main__":
    main()
