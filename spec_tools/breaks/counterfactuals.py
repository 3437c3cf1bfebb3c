"""The step without one wait, hook or free: recorded replays of broken engines, for the documentation.

``counterfactuals.toml`` chooses breaks of the catalogue. Each runs the same training step on the simulated accelerator,
and ``spec_tests/streams/replays.py`` replays it in an order in which the removed line matters::

    forward-does-not-wait, flat, 3 blocks

    launched    STEP AG0 F0 AG1 F1 ...          F0 waits for AG0
    replayed    STEP F0 AG0 AG1 F1 ...          without the wait: F0 reads what AG0 writes later

``python -m spec_tools.breaks.counterfactuals`` writes ``docs/data/counterfactual.json`` in about a minute. The site
build reads this file. A test executes the replays again and compares.

Spec: COUNTERFACTUAL-01 to COUNTERFACTUAL-03.
"""

from __future__ import annotations

import ast
import difflib
import json
import pathlib
import tomllib
from dataclasses import dataclass
from typing import Any

from spec_tests.harness.accounting import ROOT
from spec_tests.streams import engines
from spec_tools.breaks.edits import BREAKS, edited
from spec_tools.breaks.runner import broken

RECORD = ROOT / "docs" / "data" / "counterfactual.json"


@dataclass(frozen=True)
class Counterfactual:
    """One line that a reader can remove.

    Attributes:
        name: name of the break.
        group: what is removed: ``wait``, ``free``, ``hook`` or ``limit``.
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


CHOSEN = [
    Counterfactual(name, **fields)
    for name, fields in tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
]


def intact_key(one: Counterfactual) -> str:
    """The key of the replay of the intact engine with the same model."""
    return f"{one.api}, {one.num_blocks} blocks"


def replay(one: Counterfactual, folder: pathlib.Path = ROOT) -> Any:
    """The replay of the engine in ``folder`` with the same model; by default, of the intact engine."""
    return engines.call("spec_tests.streams.replays", "record", folder, one.api, one.num_blocks)


def entry(one: Counterfactual) -> dict[str, Any]:
    """The entry of a broken engine in the record."""
    with broken(BREAKS[one.name], ["minifsdp"]) as folder:
        return {**described(one), **replay(one, folder)}


def described(one: Counterfactual) -> dict[str, Any]:
    """The entry of a broken engine without the replay: texts, code and requirements."""
    known = BREAKS[one.name]
    edit = edited(known)
    return {
        "name": one.name,
        "group": one.group,
        "model": intact_key(one),
        "title": one.title,
        "what": known.what,
        "lesson": one.lesson,
        "file": edit.path.relative_to(ROOT / "minifsdp").as_posix(),
        "function": known.place,
        "code": _changed_lines(edit.before, edit.after),
        # The requirements that a program checks with this break.
        "rows": ["SIM-07", *known.rows] if known.program else [],
    }


def _changed_lines(before: str, after: str) -> list[str]:
    """The removed and added lines, without comments, each with ``-`` or ``+`` in front."""
    old, new = (ast.unparse(ast.parse(text)).splitlines() for text in (before, after))
    lines = difflib.ndiff(old, new)
    changed = [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "-+"]
    return [line for line in changed if line != "+ pass"]


def main() -> None:
    """Writes the record."""
    models = {intact_key(one): one for one in CHOSEN}
    found = {"intact": {key: replay(one) for key, one in models.items()}, "entries": [entry(one) for one in CHOSEN]}
    RECORD.write_text(json.dumps(found, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")
    print(f"{len(CHOSEN)} broken engines, {RECORD.stat().st_size} bytes")


if __name__ == "__main__":
    main()
