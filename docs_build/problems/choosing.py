"""The answers of the chapter "Which strategy fits", computed by the calculator. The text is in ``choosing.md``."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from docs_build.problems.models import MIXED, job_of, num_parameters
from docs_build.problems.writing import Givens, Values, written
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
    shown = _table("strategy", peaks, g.memory)
    fits = [f"`{name}`" for name, peak in peaks.items() if peak <= g.memory]
    return {"table": shown, "fits": " and ".join(fits), "activations": job.activations}


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
    cluster, work = (
        Cluster(g.per_machine, g.rate, g.within, g.between),
        operations(base, g.num_tokens, checkpointing=True),
    )
    peaks = {name: cost_of(job).peak for name, job in jobs.items()}
    times = {name: step_time(job, work, cluster) for name, job in jobs.items()}
    best = min((name for name in jobs if peaks[name] <= g.memory), key=lambda name: times[name].communication)
    rows = [
        [f"`{name}`", *_peak_and_whether(peaks[name], g.memory), written("{t:s}", {"t": times[name].communication})]
        for name in jobs
    ]
    return {"table": table(["strategy", "peak", "fits", "communication"], rows, "lr"), "best": f"`{best}`"}


def fewest_machines(g: Givens) -> Values:
    """The number of machines at which a large model fits."""

    def peak(num_machines: int) -> float:
        job = job_of(g.model, num_shards=num_machines * g.per_machine, **MIXED)
        return cost_of(_with_activations(job, g.num_tokens, checkpointing=True)).peak

    fewest = _first(lambda number: peak(number) <= g.memory)
    rest = _with_activations(
        job_of(g.model, num_shards=fewest * g.per_machine, **MIXED), g.num_tokens, checkpointing=True
    )
    return {
        "fewest": fewest,
        "num_ranks": fewest * g.per_machine,
        "peak": peak(fewest),
        "stored": cost_of(rest).stored,
        "fewer": fewest - 1,
        "more": peak(fewest - 1),
        "activations": rest.activations,
        "num_parameters": num_parameters(rest),
    }


def largest_micro_batch(g: Givens) -> Values:
    """The number of sequences that fit, with and without checkpointing."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)

    def peak(sequences: int, checkpointing: bool) -> float:
        return cost_of(_with_activations(job, sequences * g.num_tokens, checkpointing=checkpointing)).peak

    largest = [_first(lambda n, again=again: peak(n + 1, again) > g.memory) for again in (False, True)]  # type: ignore[misc]
    work = [operations(job, g.num_tokens, checkpointing=again) for again in (False, True)]
    return {
        "kept": largest[0],
        "again": largest[1],
        "peak": peak(largest[0], False),
        "other": peak(largest[1], True),
        "more_work": work[1] / work[0] - 1,
    }


def blocks_in_a_unit(g: Givens) -> Values:
    """The largest units that fit."""
    rows, fits = [], []
    for blocks in g.choices:
        job = job_of(g.model, blocks, num_shards=g.num_ranks, **MIXED)
        # The activations are those of the blocks, which do not change.
        activations = activation_bytes(
            job_of(g.model, num_shards=g.num_ranks, **MIXED), g.num_tokens, checkpointing=True
        )
        cost = cost_of(replace(job, activations=activations))
        rows.append([blocks, *_peak_and_whether(cost.peak, g.memory), sum(cost.num_collectives.values())])
        fits += [blocks] if cost.peak <= g.memory else []
    shown = table(["blocks in a unit", "peak", "fits", "collectives in a step"], rows, "r")
    return {"table": shown, "largest": max(fits)}


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
    parts = {"best": best, "copies": g.num_ranks // best, "machines": best // g.per_machine}
    return {"table": _table("ranks for a copy", peaks, g.memory), **parts}


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
    return [written("{peak:GB}", {"peak": peak}), "yes" if peak <= memory else "no"]
