"""Attempts to break a training, as tables. Each table is made from a record while the site is built.

=================================================  ======================================
``python -m spec_tools.faults --record``           every fault at every stage
``python -m spec_tools.faults.restarts --record``  under a real torchrun
``python -m spec_tools.kills --record``  kill -9 in a save
``python -m spec_tools.fuzz --record``             random programs
``python -m spec_tools.soak --record``             2,000 steps
=================================================  ======================================
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from docs_build.reading.text import table as markdown
from docs_build.recording.records import of_record


def _stated(heads: Iterable[str], rows: Iterable[Iterable[object]], record: dict[str, Any], words: str = "") -> str:
    """A table with the circumstances of its record below it."""
    return "\n".join([markdown(heads, rows, "lr"), "", *([words, ""] if words else []), *record["circumstances"]])


# ---- the matrix ----


@of_record("faults")
def table(record: Any) -> str:
    """A row for each stage, a column for each fault; below it the runs and their dates."""
    kinds = record["rows"].values()
    stages, faults = _axes(record)
    # If rank 0 hosts the store, not every fault was tried at every stage.
    rows = [[stage, *(_span((kind.get(stage, {}) for kind in kinds), fault) for fault in faults)] for stage in stages]
    num_cells = sum(len(row) for of_kind in kinds for row in of_kind.values())
    words = f"{num_cells} cells, on CPUs with gloo, with 2 ranks (hybrid: 4)."
    words += f" The timeout of the groups is {record['timeout']:g} s."
    return _stated(["a rank ... at", *faults], rows, record, words)


@of_record("faults")
def by_kind(record: Any) -> str:
    """The same cells by kind of training: a row for each, over all stages."""
    _, faults = _axes(record)
    rows = [[kind, *(_span(row.values(), fault) for fault in faults)] for kind, row in record["rows"].items()]
    return markdown(["API and training mode", *faults], rows, "lr")


def _axes(record: Any) -> tuple[list[str], list[str]]:
    first = next(iter(record["rows"].values()))
    return [*first], [*next(iter(first.values()))]


def _span(rows: Iterable[dict[str, float | None]], fault: str) -> str:
    """The shortest and the longest time until all ranks had reported a fault."""
    seconds = [row[fault] for row in rows if fault in row]
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return "**wrong**"
    return f"{min(known):.1f} to {max(known):.1f}" if known else ""


# ---- recovery ----


@of_record("restarts")
def restarts(record: Any) -> str:
    """A row for each fault and moment, a column for each kind of training."""
    jobs = {(job["fault"], job["moment"], job["api"], job["strategy"]): job for job in record["jobs"]}

    def cell(job: dict[str, Any]) -> str:
        return "**wrong**" if job["seconds"] is None else f"rank {job['victim']}: {job['seconds']} s"

    places, kinds = (list(dict.fromkeys(key[part] for key in jobs)) for part in (slice(2), slice(2, 4)))
    rows = [[" ".join(place), *(cell(jobs[place + kind]) for kind in kinds)] for place in places]
    return _stated(["a rank ...", *(f"`{api}`, `{strategy}`" for api, strategy in kinds)], rows, record)


@of_record("kills")
def kills(record: Any) -> str:
    """For each kind of moment the number of kills, and the checkpoints from which the next run resumed."""
    counts: Counter[tuple[str, str]] = Counter()
    for kill in record["kills"]:
        name = kill["moment"].split(" call ")[0].split(" ms")[0].rstrip("0123456789. ")
        name = {"after": "some milliseconds after it began", "before": "before any call"}.get(name, name)
        counts[name, kill["api"]] += 1
    lost = Counter(kill["api"] for kill in record["kills"] if "wrong" in kill)
    moments, apis = (list(dict.fromkeys(key[part] for key in counts)) for part in (0, 1))
    rows = [[name, *(counts[name, api] for api in apis)] for name in moments]
    sums = (f"**{sum(counts[name, api] for name in moments)}, {lost[api]}**" for api in apis)
    rows.append(["**all, checkpoints lost**", *sums])
    heads = ["killed", *(f"`{api}`" for api in apis)]
    return _stated(heads, rows, record, f"Checkpoints lost: {lost.total()}.")


# ---- long runs ----

APIS = {"wrapped": "`FullyShardedDataParallel`", "composed": "`fully_shard`"}
PROGRAMS = ("programs", "calls", "refused", "hybrid", "mixed precision", "ended early", "findings")
# Each resource: its description, unit and divisor.
HELD = {
    "tensors": ("live tensors", "", 1),
    "tensor_bytes": ("their bytes", " kB", 1e3),
    "objects": ("objects of the package", "", 1),
    "queued": ("messages in queues", "", 1),
    "ledger": ("records in the collective log", "", 1),
    "descriptors": ("file descriptors", "", 1),
    "threads": ("threads", "", 1),
    "on_disk": ("files of checkpoints", "", 1),
    "python_bytes": ("Python's memory", " kB", 1e3),
    "resident_bytes": ("memory of the process", " MiB", 2**20),
}


@of_record("fuzz")
def fuzz(record: Any) -> str:
    """A row for each run of random programs."""
    rows = [
        [APIS[run["api"]] + ", ranks do different things" * run["apart"], *(f"{run[c]:,}" for c in PROGRAMS)]
        for run in record["runs"]
    ]
    total = sum(run["programs"] for run in record["runs"])
    return _stated(["through", *PROGRAMS], rows, record, f"{total:,} programs in all.")


@of_record("soak")
def soak(record: Any) -> str:
    """The resources of a rank early and late, a column for each count."""
    samples = [(run["api"], run[when]) for run in record["runs"] for when in ("first", "last")]
    rows = [
        [words, *(f"{sample[name] / divisor:,.0f}{unit}" for _, sample in samples)]
        for name, (words, unit, divisor) in HELD.items()
    ]
    return _stated(["on rank 0", *(f"`{api}`, after step {one['step']:,}" for api, one in samples)], rows, record)
