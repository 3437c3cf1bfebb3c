"""Tests of the race checker: more than a hundred broken engines, and a program that detects each of them.

If a race checker reports nothing, it can be correct or defective. So the engine is broken on purpose: each wait, hold,
follow, ``record_stream``, copy and stream of the package is removed or moved, one at a time, and a small program runs
on the result. The breaks are data, in ``broken/``::

    Break("no-record-stream", "engine/lifetime.py",
          old="        storage_owner.record_stream(compute_stream)\\n",    exactly once in the file
          new="",
          what="The allocator is not told that the compute stream still reads.",
          program="flat_full", by="collision")

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

If a refactoring of the engine changes such a passage, the test of its break fails and shows the passage. The break must
then be rewritten for the new engine.

``python -m spec_tests.streams.breaks`` writes the table ``docs/data/stream-breaks.json`` in about two minutes.

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

SCHEDULES = 8  # number of other orders that are tried for each program

TABLE = ROOT / "docs" / "data" / "stream-breaks.json"

# Breaks that violate a requirement: the requirement is tested because these breaks are found.
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
    r"\.(wait|wait_event|wait_stream|wait_compute|record_stream|record_event|synchronize|handle)\(|\.join\(\)"
    "|non_blocking="
)
# Lines without a break, and the reasons.
LEFT_OUT = {
    "batches.py: work.wait(": "an accelerator sends on a stream of its own, and only CPUs have something to wait for",
    "batches.py: collectives.all_reduce(ranks, total": "an accelerator sends on the stream that reads",
    "checkpoint/tensors.py: collectives.all_gather(": "loading a sharded state dict begins with a barrier of all ranks",
    "checkpoint/codec.py: collectives.all_gather(": "the optimizer's state begins with a barrier of all ranks",
    "engine/changes.py: collectives.all_gather(": "the hashes of fake ranks differ, which is an error",
    "engine/gloo.py: message.wait(": "between CPUs alone",
    "engine/gloo.py: self._work.wait(": "between CPUs alone",
    "engine/gloo.py: exchange.wait(": "between CPUs alone",
    "engine/gloo.py: backend.recv(": "between CPUs alone, when all waits in a group end",
    "engine/reduce.py: comm_stream.join(": "after an exception of a hook, tested by GRAD-05",
    "engine/reduce.py: comm_stream.wait_compute(": "after an exception of a hook, tested by GRAD-05",
    "engine/gloo.py: self.all_gather_apart(": "between CPUs alone",
    "fsdp1/wrapper.py: initial.synchronize(": "has nothing to do with streams",
    "watchdog/": "a thread that has nothing to do with streams",
    "debugging/values.py: collectives.all_reduce(": "is off, and stops the CPU on purpose",
    "engine/rank_checks.py: self._arrived = ": "only tells `read` that the answer is read later, with `synchronize`",
    "engine/rank_checks.py: arrived.synchronize(": "a whole backward lies between the question and this",
    "engine/rank_checks.py: question.wait(": "a stream has waited already, and a CPU needs no order",
    "engine/rank_checks.py: store.wait(": "text of the ranks in the store, not on a stream",
    "engine/collectives.py: Collective(function.__name__": "what it calls has waited by itself",
}


def unbroken() -> list[str]:
    """Lines of the package that order something on streams and are neither in a break's passage nor in `LEFT_OUT`."""
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
    """The entry of a break in the table."""
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
