"""Numbers and tables of the prose, computed from recorded runs or by the package."""

from collections.abc import Callable
from importlib import import_module

from docs_build.drawing.pictures import events_of
from docs_build.pages import evidence, modulepage
from docs_build.reading.text import table
from minifsdp_tools.events import peak_gathered_bytes


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def counts_table() -> str:
    """Collectives and peak of unsharded memory, counted in recorded runs."""
    runs = [
        ("`FULL_SHARD`, a unit for each block", "fsdp1-full-pre-block-2-wide"),
        ("`SHARD_GRAD_OP`, the same units", "fsdp1-zero2-pre-block-2-wide"),
        ("`NO_SHARD`, the same units", "fsdp1-none-pre-block-2-wide"),
        ("`FULL_SHARD`, one unit for all", "fsdp1-full-pre-whole-2-wide"),
        ("`fully_shard`, a unit for each block", "fsdp2-full-pre-block-2-wide"),
    ]
    rows = []
    for title, key in runs:
        events = events_of(key)[0]
        counts = [sum(event.kind == kind for event in events) for kind in ("AG", "RS", "AR")]
        rows.append([title, *counts, _megabytes(peak_gathered_bytes(events))])
    return table(["run", "all-gathers", "reduce-scatters", "all-reduces", "peak of unsharded parameters"], rows)


def prefetch_table() -> str:
    """The order of backward, as recorded, for each kind of prefetch."""
    kinds = {"`BACKWARD_PRE`": "fsdp1-full-pre", "`BACKWARD_POST`": "fsdp1-full-post", "`None`": "fsdp1-full-off"}
    rows = []
    for title, key in {**kinds, "`fully_shard`": "fsdp2-full-pre"}.items():
        events = events_of(f"{key}-block-2-wide")[0]
        start = next(n for n, event in enumerate(events) if event.kind == "B")
        shown = (event for event in events[start:] if event.kind in ("AG", "B", "FREE", "RS"))
        words = " ".join(f"{event.kind}{event.unit[-1:] or 'R'}" for event in shown)
        rows.append([title, f"`{words}`{{ .order }}", _megabytes(peak_gathered_bytes(events))])
    return table(["prefetch", "backward, as recorded", "peak"], rows)


def bf16_table() -> str:
    """The effect of a narrow dtype on a recorded step."""
    rows = []
    for title, key in [("float32", "fsdp1-full-pre-block-2-wide"), ("bfloat16", "fsdp1-full-pre-block-2-bf16-wide")]:
        events = events_of(key)[0]
        sums = [sum(e.num_bytes for e in events if e.kind == kind) for kind in ("AG", "RS")]
        rows.append([title, *map(_megabytes, [*sums, peak_gathered_bytes(events)])])
    return table(["compute and reduce dtype", "all-gathered in a step", "reduced in a step", "unsharded peak"], rows)


VALUES: dict[str, Callable[[], object]] = {
    "num-modules": lambda: len(modulepage.steps()),
    "num-lines": lambda: f"{modulepage.num_lines():,}",
    "noticed-mutants": lambda: evidence.mutants()[0],
    "num-mutants": lambda: evidence.mutants()[1],
    "mutated-rows": lambda: evidence.mutants()[2],
}


def made(name: str, *arguments: str) -> str:
    """A table by the module of this folder and the function that makes it, as in ``measured.growth``."""
    module, _, function = name.partition(".")
    return str(getattr(import_module(f"docs_build.pages.{module}"), function)(*arguments))
