"""The answers of the chapter "Which strategy fits", computed by the calculator. The text is in ``choosing.md``."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from docs_build.problems.models import MIXED, job_of, num_parameters
from docs_build.problems.writing import Givens, Values, shown
from docs_build.reading.text import table
from minifsdp_tools.cost import Cluster, Job, activation_bytes, cost_of, operations, step_time


def fits_on_a_machine(g: Givens) -> Values:
    """The peaks of three strategies."""
    job = _with_activations(job_of(g.model, num_shards=g.num_ranks, **MIXED), g.num_tokens)
    peaks = {
        "NO_SHARD": cost_of(replace(job, strategy="NO_SHARD", num_replicas=g.num_ranks)).peak,
        "SHARD_GRAD_OP": cost_of(replace(job, strategy="SHARD_GRAD_OP")).peak,
        "FULL_SHARD": cost_of(job).peak,
    }
    fits = [f"`{name}`" for name, peak in peaks.items() if peak <= g.memory]
    return {"table": _table("strategy", peaks, g.memory), "fits": " and ".join(fits), "activations": job.activations}


def fastest_that_fits(g: Givens) -> Values:
    """Peak and communication time of four strategies."""
    num_ranks = g.num_machines * g.per_machine
    base = _with_activations(job_of(g.model, num_shards=num_ranks, **MIXED), g.num_tokens, checkpointing=True)
    copies = {"num_shards": g.per_machine, "num_replicas": g.num_machines}
    jobs = {
        "FULL_SHARD": base,
        "SHARD_GRAD_OP": replace(base, strategy="SHARD_GRAD_OP"),
        "HYBRID_SHARD": replace(base, strategy="HYBRID_SHARD", **copies),
        "_HYBRID_SHARD_ZERO2": replace(base, strategy="_HYBRID_SHARD_ZERO2", **copies),
    }
    cluster = Cluster(g.per_machine, g.rate, g.within, g.between)
    work = operations(base, g.num_tokens, checkpointing=True)
    peaks = {name: cost_of(job).peak for name, job in jobs.items()}
    times = {name: step_time(job, work, cluster) for name, job in jobs.items()}
    best = min((name for name in jobs if peaks[name] <= g.memory), key=lambda name: times[name].communication)
    rows = [
        [f"`{name}`", *_peak_and_whether(peaks[name], g.memory), shown(times[name].communication, "s")] for name in jobs
    ]
    return {"table": table(["strategy", "peak", "fits", "communication"], rows, "lr"), "best": f"`{best}`"}


def fewest_machines(g: Givens) -> Values:
    """The number of machines at which a large model fits."""

    def job(num_machines: int) -> Job:
        ranks = job_of(g.model, num_shards=num_machines * g.per_machine, **MIXED)
        return _with_activations(ranks, g.num_tokens, checkpointing=True)

    def peak(num_machines: int) -> float:
        return cost_of(job(num_machines)).peak

    fewest = _first(lambda number: peak(number) <= g.memory)
    chosen = job(fewest)
    sizes = {"stored": cost_of(chosen).stored, "num_parameters": num_parameters(chosen)}
    return {"fewest": fewest, "peak": peak, "job": chosen, **sizes}


def largest_micro_batch(g: Givens) -> Values:
    """The number of sequences that fit, with and without checkpointing."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)

    def peak(sequences: int, checkpointing: bool) -> float:
        return cost_of(_with_activations(job, sequences * g.num_tokens, checkpointing=checkpointing)).peak

    kept, again = (_first(lambda n, again=again: peak(n + 1, again) > g.memory) for again in (False, True))  # type: ignore[misc]
    work = [operations(job, g.num_tokens, checkpointing=checkpointing) for checkpointing in (False, True)]
    return {"kept": kept, "again": again, "peak": peak, "more_work": work[1] / work[0] - 1}


def blocks_in_a_unit(g: Givens) -> Values:
    """The largest units that fit."""
    # The activations are those of the blocks, which do not change.
    activations = activation_bytes(job_of(g.model, num_shards=g.num_ranks, **MIXED), g.num_tokens, checkpointing=True)
    costs = {}
    for blocks in g.choices:
        job = job_of(g.model, blocks, num_shards=g.num_ranks, **MIXED)
        costs[blocks] = cost_of(replace(job, activations=activations))
    rows = [
        [blocks, *_peak_and_whether(cost.peak, g.memory), sum(cost.num_collectives.values())]
        for blocks, cost in costs.items()
    ]
    shown_rows = table(["blocks in a unit", "peak", "fits", "collectives in a step"], rows, "r")
    return {"table": shown_rows, "largest": max(blocks for blocks, cost in costs.items() if cost.peak <= g.memory)}


def smaller_state(g: Givens) -> Values:
    """The peak with three optimizers."""
    job = _with_activations(job_of(g.model, num_shards=g.num_ranks, **MIXED), g.num_tokens, checkpointing=True)
    peaks = {name: cost_of(replace(job, optimizer=state)).peak for name, state in g.states}
    fits = [name for name, peak in peaks.items() if peak <= g.memory]
    return {"table": _table("optimizer", peaks, g.memory), "fits": " and ".join(fits)}


def shards_of_a_copy(g: Givens) -> Values:
    """The smallest shard group of a hybrid strategy that fits."""
    peaks = {}
    for shards in g.choices:
        copies = {"num_shards": shards, "num_replicas": g.num_ranks // shards}
        job = job_of(g.model, strategy="HYBRID_SHARD", **copies, **MIXED)
        peaks[shards] = cost_of(_with_activations(job, g.num_tokens, checkpointing=True)).peak
    best = min(shards for shards, peak in peaks.items() if peak <= g.memory)
    return {"table": _table("ranks for a copy", peaks, g.memory), "best": best}


def _with_activations(job: Job, num_tokens: int, *, checkpointing: bool = False) -> Job:
    return replace(job, activations=activation_bytes(job, num_tokens, checkpointing=checkpointing))


def _first(is_right: Callable[[int], bool]) -> int:
    return next(number for number in itertools.count(1) if is_right(number))


def _table(what: str, peaks: dict[Any, float], memory: float) -> str:
    rows = [
        [name if isinstance(name, int) else f"`{name}`", *_peak_and_whether(peak, memory)]
        for name, peak in peaks.items()
    ]
    return table([what, "peak", "fits"], rows, "lr")


def _peak_and_whether(peak: float, memory: float) -> list[str]:
    return [shown(peak, "GB"), "yes" if peak <= memory else "no"]
