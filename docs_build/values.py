"""Numbers and tables of the prose, computed from recorded runs or by the package."""

from __future__ import annotations

from collections.abc import Callable

from docs_build import debugcost, evidence, faults, growth, optimizers, results, streams
from docs_build.pictures import events_of
from minifsdp.tools import formulas
from minifsdp.tools.events import peak_gathered_bytes

__all__ = ["table", "value"]


def value(name: str) -> str:
    """A number for the running text.

    Raises:
        KeyError: there is no value with that name.
    """
    return VALUES[name]()


def table(name: str) -> str:
    """A Markdown table.

    Raises:
        KeyError: there is no table with that name.
    """
    return TABLES[name]()


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *["| " + " | ".join(row) + " |" for row in rows]])


def zero_table() -> str:
    """Table 1 of the ZeRO paper, recomputed."""
    rows = []
    for ranks in (1, 4, 16, 64, 256, 1024):
        cells = [str(ranks)]
        for billions in (7.5, 128, 1000):
            cells.append(" / ".join(map(_plain, zero_gigabytes(billions, ranks))))
        rows.append(cells)
    return _rows(["ranks", "7.5 B", "128 B", "1 T"], rows)


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def zero_gigabytes(billions: float, ranks: int) -> tuple[float, ...]:
    """Bytes of stored state in GB: optimizer state sharded, gradients too, parameters too (16-bit, Adam with K=12)."""
    return tuple(formulas.zero_bytes(billions, ranks, stage) for stage in (1, 2, 3))


def traffic_table() -> str:
    """The FSDP paper's bytes across hosts, and the counted bytes of the hybrid."""
    rows = []
    for world, per_host in [(16, 8), (64, 8), (512, 8)]:
        replicated, sharded = formulas.ring_all_reduce_sends(1, world), 3 * formulas.gather_sends(1, world)
        printed = formulas.hybrid_cross_host_as_printed(1, world, per_host)
        exact = formulas.hybrid_cross_host(1, world, per_host)
        rows.append(
            [f"{world}, {per_host} on a host", *(f"{number:.4g}" for number in (replicated, sharded, printed, exact))]
        )
    return _rows(["GPUs", "full replication", "full sharding", "hybrid, as printed", "hybrid, counted"], rows)


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
        counts = [str(sum(event.kind == kind for event in events)) for kind in ("AG", "RS", "AR")]
        rows.append([title, *counts, f"{peak_gathered_bytes(events) / 1e6:.2f} MB"])
    return _rows(["run", "all-gathers", "reduce-scatters", "all-reduces", "peak of unsharded parameters"], rows)


def prefetch_table() -> str:
    """The order of backward, as recorded, for each kind of prefetch."""
    rows = []
    for title, key in [
        ("`BACKWARD_PRE`", "fsdp1-full-pre-block-2-wide"),
        ("`BACKWARD_POST`", "fsdp1-full-post-block-2-wide"),
        ("`None`", "fsdp1-full-off-block-2-wide"),
        ("`fully_shard`", "fsdp2-full-pre-block-2-wide"),
    ]:
        events = events_of(key)[0]
        start = next(n for n, event in enumerate(events) if event.kind == "B")
        words = [
            f"{event.kind}{event.unit[-1:] or 'R'}"
            for event in events[start:]
            if event.kind in ("AG", "B", "FREE", "RS")
        ]
        rows.append([title, "`" + " ".join(words) + "`{ .order }", f"{peak_gathered_bytes(events) / 1e6:.2f} MB"])
    return _rows(["prefetch", "backward, as recorded", "peak"], rows)


def bf16_table() -> str:
    """The effect of a narrow dtype on a recorded step."""
    rows = []
    for title, key in [("float32", "fsdp1-full-pre-block-2-wide"), ("bfloat16", "fsdp1-full-pre-block-2-bf16-wide")]:
        events = events_of(key)[0]
        sums = [sum(e.num_bytes for e in events if e.kind == kind) / 1e6 for kind in ("AG", "RS")]
        peak = peak_gathered_bytes(events) / 1e6
        rows.append([title, f"{sums[0]:.2f} MB", f"{sums[1]:.2f} MB", f"{peak:.2f} MB"])
    return _rows(["compute and reduce dtype", "all-gathered in a step", "reduced in a step", "unsharded peak"], rows)


def _proven(backend: str) -> str:
    return str(sum(row.results.get(backend) == "proven" for row in results.all_rows().values()))


VALUES: dict[str, Callable[[], str]] = {
    "num-rows": lambda: str(len(results.all_rows())),
    "proven-cpu": lambda: _proven("cpu-gloo"),
    "proven-simulated": lambda: _proven("simulated"),
    "proven-cuda": lambda: _proven("cuda-nccl"),
    "calls-torch": lambda: growth.calls("torch"),
    "calls-minifsdp": lambda: growth.calls("minifsdp"),
    "overhead-torch": lambda: growth.overhead("torch"),
    "overhead-minifsdp": lambda: growth.overhead("minifsdp"),
    "calls-by-ranks": lambda: growth.calls_by_ranks("torch FSDP1 flat"),
    "calls-for-a-parameter-torch": lambda: growth.calls_for_a_parameter("torch FSDP2"),
    "calls-for-a-parameter-minifsdp": lambda: growth.calls_for_a_parameter("minifsdp FSDP2"),
    "optimizer-minifsdp": lambda: optimizers.step("minifsdp FSDP2"),
    "optimizer-torch": lambda: optimizers.step("torch FSDP2"),
    "noticed-mutants": lambda: str(evidence.mutants()[0]),
    "num-mutants": lambda: str(evidence.mutants()[1]),
    "mutated-rows": lambda: str(evidence.mutants()[2]),
}
TABLES: dict[str, Callable[[], str]] = {
    "zero": zero_table,
    "traffic": traffic_table,
    "counts": counts_table,
    "prefetch": prefetch_table,
    "bf16": bf16_table,
    "debug-cost": debugcost.table,
    "faults": faults.table,
    "faults-by-kind": faults.by_kind,
    "restarts": faults.restarts,
    "kills": faults.kills,
    "fuzz": faults.fuzz,
    "soak": faults.soak,
    "torch-tests": evidence.torch_tests_table,
    "where": evidence.where_table,
    "stream-peaks": streams.peaks,
    "optimizer": optimizers.table,
}
