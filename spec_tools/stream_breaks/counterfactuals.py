"""The step without one wait, hook or free: recorded replays of broken engines, for the documentation.

The broken engines are those of ``breaks.py`` and of the catalogue of mutants. Each runs the same training step on the
simulated accelerator, and ``spec_tests/streams/replays.py`` replays it in an order in which the removed line matters::

    Counterfactual("forward-does-not-wait", "wait", "flat", 3, ...)

    launched    STEP AG0 F0 AG1 F1 ...          F0 waits for AG0
    replayed    STEP F0 AG0 AG1 F1 ...          without the wait: F0 reads what AG0 writes later

``python -m spec_tools.stream_breaks.counterfactuals`` writes ``docs/data/counterfactual.json`` in about half a minute.
The site build reads this file. A test executes the replays again and compares.

Spec: COUNTERFACTUAL-01 to COUNTERFACTUAL-03.
"""

from __future__ import annotations

import ast
import difflib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from spec_tests.harness.accounting import ROOT
from spec_tests.streams import engines
from spec_tests.streams.engines import PACKAGE, Break
from spec_tools.mutants.catalogue import MUTANTS
from spec_tools.stream_breaks.breaks import BREAKS, ROWS

__all__ = ["CHOSEN", "RECORD", "Counterfactual", "described", "entry", "intact", "intact_key"]

RECORD = ROOT / "docs" / "data" / "counterfactual.json"


@dataclass(frozen=True)
class Counterfactual:
    """One line that a reader can remove.

    Attributes:
        name: name of the break or of the mutant.
        group: what is removed, one of `GROUPS`.
        api: the front end of the model, a key of `replays.MODELS`.
        num_blocks: number of blocks, each a unit.
        title: the removed line, in words.
        lesson: why the line is necessary.
    """

    name: str
    group: str
    api: str
    num_blocks: int
    title: str
    lesson: str


GROUPS = ("wait", "free", "hook", "limit")

CHOSEN = [
    Counterfactual(
        "forward-does-not-wait",
        "wait",
        "flat",
        3,
        "forward waits for its all-gather",
        "The CPU launches the forward directly after the all-gather. Without the wait, the forward can read the "
        "unsharded parameters before they have arrived.",
    ),
    Counterfactual(
        "backward-does-not-wait",
        "wait",
        "flat",
        3,
        "backward waits for its all-gather",
        "The parameters were resharded after forward, so backward all-gathers them again. Without the wait, it can "
        "read memory that contains no parameters.",
    ),
    Counterfactual(
        "rows-sorted-before-they-arrive",
        "wait",
        "per parameter",
        3,
        "the copy-out waits for its all-gather",
        "fully_shard all-gathers into a buffer, and copies each parameter out of it. The copy must wait. The "
        "forward runs after the copy on the same stream, so it needs no wait of its own.",
    ),
    Counterfactual(
        "gathers-before-the-optimizer",
        "wait",
        "flat",
        3,
        "the first all-gather waits for the optimizer",
        "The optimizer writes the shards on the compute stream. Without the wait, the all-gather of the next step "
        "can send the values from before the optimizer step.",
    ),
    Counterfactual(
        "reduces-before-backward",
        "wait",
        "flat",
        3,
        "the reduce-scatter waits for backward",
        "The gradient is written on the compute stream and sent on the reduce stream. Without the wait, the "
        "reduce-scatter can send a gradient that is not complete.",
    ),
    Counterfactual(
        "reduction-not-waited-for",
        "wait",
        "flat",
        3,
        "the optimizer waits for the last reduce-scatter",
        "The end of backward makes the compute stream wait for the reductions. Without this wait, the optimizer can "
        "read a gradient before its reduce-scatter and the division are complete.",
    ),
    Counterfactual(
        "no-record-stream",
        "free",
        "flat",
        3,
        "record_stream before the reshard",
        "The all-gather stream owns the memory of the unsharded parameters. The CPU frees it while the forward "
        "still reads it. record_stream makes the allocator keep it until the compute stream has passed this point.",
    ),
    Counterfactual(
        "buffer-given-back-at-once",
        "free",
        "per parameter",
        3,
        "the all-gather stream waits before its buffer is reused",
        "The buffer of an all-gather is freed after the copy-out is launched. The next all-gather gets the same "
        "memory. Without the wait, it can overwrite the buffer before the copy has read it.",
    ),
    Counterfactual(
        "whole-dropped-without-waiting",
        "free",
        "per parameter",
        3,
        "a gradient is kept until its reduce-scatter has read it",
        "The unsharded gradient of a unit is freed when the next unit needs a bucket. Without the wait, the copy "
        "into the next bucket can overwrite a gradient that the reduce-scatter still reads.",
    ),
    Counterfactual(
        "kept-after-backward",
        "free",
        "flat",
        3,
        "the reshard after the backward of a unit",
        "All values are correct. But the unsharded parameters of all units stay in memory until the end of backward.",
    ),
    Counterfactual(
        "inputs-are-not-watched",
        "hook",
        "per parameter",
        3,
        "the post-backward hook",
        "The end of backward handles units whose hook did not run, so all values are correct. But no reduce-scatter "
        "can run during backward, and the gradients and parameters of all units are in memory together.",
    ),
    Counterfactual(
        "unlimited-gathers",
        "limit",
        "flat",
        5,
        "the rate limiter",
        "The CPU is faster than the device. Without the limit it issues the all-gathers of all units early, and "
        "each of them allocates the unsharded parameters of its unit.",
    ),
]


def intact_key(one: Counterfactual) -> str:
    """The key of the replay of the intact engine with the same model."""
    return f"{one.api}, {one.num_blocks} blocks"


def intact(one: Counterfactual) -> dict[str, Any]:
    """The replay of the intact engine with the same model."""
    found: dict[str, Any] = engines.call("spec_tests.streams.replays", "record", ROOT, one.api, one.num_blocks)
    return found


def entry(one: Counterfactual) -> dict[str, Any]:
    """The entry of a broken engine in the record."""
    with engines.broken(_break(one)) as folder:
        replay = engines.call("spec_tests.streams.replays", "record", folder, one.api, one.num_blocks)
    return {**described(one), **replay}


def described(one: Counterfactual) -> dict[str, Any]:
    """The entry of a broken engine without the replay: texts, code and requirements."""
    known = _break(one)
    edited = known.edit.apply(PACKAGE)
    return {
        "name": one.name,
        "group": one.group,
        "model": intact_key(one),
        "title": one.title,
        "what": known.what,
        "lesson": one.lesson,
        "file": edited.path.relative_to(PACKAGE).as_posix(),
        "function": known.edit.place,
        "code": _changed_lines(edited.path.read_text(encoding="utf-8"), edited.text),
        "rows": _rows(one.name),
    }


def _break(one: Counterfactual) -> Break:
    """The break with this name, or the mutant as a break."""
    if one.name in BREAKS:
        return BREAKS[one.name]
    mutant = MUTANTS[one.name]
    return Break(mutant.name, mutant.what, mutant.edit, "")


def _rows(name: str) -> list[str]:
    """The requirements that ``test_breaks.py`` checks with a broken engine; empty for a mutant."""
    if name not in BREAKS:
        return []
    return ["SIM-07", *(row for row, names in ROWS.items() if name in names)]


def _changed_lines(before: str, after: str) -> list[str]:
    """The removed and added lines, without comments, each with ``-`` or ``+`` in front."""
    lines = difflib.ndiff(ast.unparse(ast.parse(before)).splitlines(), after.splitlines())
    changed = [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "-+"]
    return [line for line in changed if line != "+ pass"]


def main() -> None:
    """Writes the record."""
    with ThreadPoolExecutor(2) as executor:
        entries = list(executor.map(entry, CHOSEN))
        models = {intact_key(one): one for one in CHOSEN}
        replays = list(executor.map(intact, models.values()))
    found = {"intact": dict(zip(models, replays, strict=True)), "entries": entries}
    RECORD.write_text(json.dumps(found, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")
    print(f"{len(entries)} broken engines, {RECORD.stat().st_size} bytes")


if __name__ == "__main__":
    main()
