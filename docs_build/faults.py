"""Attempts to break a training, as tables: each is made from a record while the site is built.

=================================================  ======================================
``python -m spec_tests.faults --record``           every fault at every stage
``python -m spec_tests.faults.restarts --record``  under a real torchrun
``python -m spec_tests.tutorials.kills --record``  kill -9 in a save
``python -m spec_tests.fuzz --record``             random programs
``python -m spec_tests.soak --record``             2,000 steps
=================================================  ======================================
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from docs_build.order import ROOT

__all__ = ["DATA", "by_kind", "fuzz", "kills", "restarts", "soak", "table"]

DATA = ROOT / "docs" / "data"
NONE = "No run is recorded."

Seconds = list[float | None]


def _record(name: str) -> dict[str, Any] | None:
    path = DATA / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _rows(heads: Iterable[str], rows: Iterable[Iterable[object]], align: str = "--:") -> list[str]:
    first, *others = heads
    lines = [f"| {' | '.join([first, *others])} |", "|---|" + f"{align}|" * len(others)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def _told(lines: list[str], record: dict[str, Any], words: str = "") -> str:
    return "\n".join([*lines, "", *([words, ""] if words else []), *record["circumstances"]])


# ---- the matrix ----


def table() -> str:
    """A row for each stage, a column for each fault, in Markdown; below it the runs and their dates."""
    record = _record("faults")
    if record is None:
        return NONE
    kinds, timeout = record["rows"], record["timeout"]
    stages, faults = _axes(kinds)

    def cell(stage: str, fault: str) -> str:
        # If rank 0 hosts the store, not every fault was tried at every stage.
        return _span([row[stage][fault] for row in kinds.values() if fault in row.get(stage, {})])

    rows = [[stage, *(cell(stage, fault) for fault in faults)] for stage in stages]
    num_cells = sum(len(row) for of_kind in kinds.values() for row in of_kind.values())
    words = (
        f"{num_cells} cells, on CPUs with gloo, with 2 ranks (hybrid: 4). The timeout of the groups is {timeout:g} s."
    )
    return _told(_rows(["a rank ... at", *faults], rows), record, words)


def by_kind() -> str:
    """The same cells by kind of training: a row for each, over all stages."""
    record = _record("faults")
    if record is None:
        return NONE
    kinds = record["rows"]
    _, faults = _axes(kinds)

    def cell(kind: str, fault: str) -> str:
        return _span([row[fault] for row in kinds[kind].values() if fault in row])

    return "\n".join(_rows(["API and training mode", *faults], [[k, *(cell(k, f) for f in faults)] for k in kinds]))


def _axes(kinds: dict[str, Any]) -> tuple[list[str], list[str]]:
    first = next(iter(kinds.values()))
    return [*first], [*next(iter(first.values()))]


def _span(seconds: Seconds) -> str:
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return "**wrong**"
    return f"{min(known):.1f} to {max(known):.1f}" if known else ""


# ---- recovery ----


def restarts() -> str:
    """A row for each fault and moment, a column for each kind of training."""
    record = _record("restarts")
    if record is None:
        return NONE
    jobs = record["jobs"]
    kinds = list(dict.fromkeys((job["api"], job["strategy"]) for job in jobs))

    def cell(fault: str, moment: str, kind: tuple[str, str]) -> str:
        key = (fault, moment, *kind)
        job = next(job for job in jobs if (job["fault"], job["moment"], job["api"], job["strategy"]) == key)
        return "**wrong**" if job["seconds"] is None else f"rank {job['victim']}: {job['seconds']} s"

    places = dict.fromkeys((job["fault"], job["moment"]) for job in jobs)
    rows = [[f"{fault} {moment}", *(cell(fault, moment, kind) for kind in kinds)] for fault, moment in places]
    return _told(_rows(["a rank ...", *(f"`{api}`, `{strategy}`" for api, strategy in kinds)], rows), record)


def kills() -> str:
    """For each kind of moment the number of kills, and the checkpoints from which the next run resumed."""
    record = _record("kills")
    if record is None:
        return NONE
    doors = list(dict.fromkeys(kill["door"] for kill in record["kills"]))
    by_moment: dict[str, Counter[str]] = {}
    for kill in record["kills"]:
        name = kill["moment"].split(" call ")[0].split(" ms")[0].rstrip("0123456789. ")
        name = {"after": "some milliseconds after it began", "before": "before any call"}.get(name, name)
        by_moment.setdefault(name, Counter())[kill["door"]] += 1
    rows = [[name, *(counts[door] for door in doors)] for name, counts in by_moment.items()]
    lost = sum("wrong" in kill for kill in record["kills"])
    rows.append(["**all, checkpoints lost**", *(_of_door(record, door) for door in doors)])
    return _told(_rows(["killed", *(f"`{door}`" for door in doors)], rows), record, f"Checkpoints lost: {lost}.")


def _of_door(record: dict[str, Any], door: str) -> str:
    mine = [kill for kill in record["kills"] if kill["door"] == door]
    return f"**{len(mine)}, {sum('wrong' in kill for kill in mine)}**"


# ---- long runs ----


def fuzz() -> str:
    """A row for each run of random programs."""
    record = _record("fuzz")
    if record is None:
        return NONE
    columns = ("programs", "calls", "refused", "hybrid", "mixed precision", "ended early", "findings")
    rows = [
        [
            _DOORS[run["door"]] + (", ranks do different things" if run["apart"] else ""),
            *(f"{run[c]:,}" for c in columns),
        ]
        for run in record["runs"]
    ]
    total = sum(run["programs"] for run in record["runs"])
    return _told(_rows(["through", *columns], rows), record, f"{total:,} programs in all.")


_DOORS = {"wrapped": "`FullyShardedDataParallel`", "composed": "`fully_shard`"}
_HELD: dict[str, Callable[[Any], str]] = {
    "tensors": "{:,}".format,
    "tensor_bytes": lambda number: f"{number / 1e3:,.0f} kB",
    "objects": "{:,}".format,
    "queued": "{:,}".format,
    "ledger": "{:,}".format,
    "descriptors": "{:,}".format,
    "threads": "{:,}".format,
    "on_disk": "{:,}".format,
    "python_bytes": lambda number: f"{number / 1e3:,.0f} kB",
    "resident_bytes": lambda number: f"{number / 2**20:,.0f} MiB",
}
_WORDS = {
    "tensors": "live tensors",
    "tensor_bytes": "their bytes",
    "objects": "objects of the package",
    "queued": "messages in queues",
    "ledger": "records in the collective log",
    "descriptors": "file descriptors",
    "on_disk": "files of checkpoints",
    "python_bytes": "Python's memory",
    "resident_bytes": "memory of the process",
}


def soak() -> str:
    """The resources of a rank early and late, a column for each count."""
    record = _record("soak")
    if record is None:
        return NONE
    runs = record["runs"]
    heads = [f"`{run['api']}`, after step {run[when]['step']:,}" for run in runs for when in ("first", "last")]
    rows = [
        [_WORDS.get(name, name), *(shown(run[when][name]) for run in runs for when in ("first", "last"))]
        for name, shown in _HELD.items()
    ]
    return _told(_rows(["on rank 0", *heads], rows), record)
