"""The answers of the chapter "How long a step is at least". The text is in ``time.md``.

The calculator computes lower bounds. The simulator computes the time of a step from the recorded order of its work.
"""

import math
from dataclasses import replace
from typing import Any

from docs_build.problems.models import MIXED, job_of, num_parameters, simulated
from docs_build.problems.writing import written
from docs_build.reading.text import table
from minifsdp_tools.cost import Cluster, Job, cost_of, operations, sent_by_link, step_time
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import Shape

Values = dict[str, Any]


def compute_alone(*, model: str = "llama3-8b", num_tokens: int = 8192, rate: float = 400e12) -> Values:
    """The time of the matrix products."""
    job = job_of(model, **MIXED)
    work = operations(job, num_tokens)
    parameters = num_parameters(job)
    return {"work": work, "seconds": work / rate, "each": work / num_tokens / parameters, "of": parameters}


def compute_or_network(
    *,
    model: str = "llama3-8b",
    num_machines: int = 8,
    per_machine: int = 8,
    num_tokens: int = 8192,
    rate: float = 400e12,
    within: float = 300e9,
    between: float = 6.25e9,
) -> Values:
    """The bounds of a step, and the resource that decides."""
    job = job_of(model, num_shards=num_machines * per_machine, **MIXED)
    time = step_time(job, operations(job, num_tokens), Cluster(per_machine, rate, within, between))
    links = _seconds_of_links(job, Cluster(per_machine, rate, within, between))
    slowest = max({"computation": time.compute, **links}.items(), key=lambda one: one[1])[0]
    return {"compute": time.compute, "overlapped": time.overlapped, "apart": time.apart, "slowest": slowest,
            "within_seconds": links["the links within a machine"],
            "between_seconds": links["the links between machines"]}  # fmt: skip


def tokens_to_hide(
    *,
    model: str = "llama3-8b",
    num_machines: int = 16,
    per_machine: int = 8,
    rate: float = 400e12,
    within: float = 300e9,
    between: float = 6.25e9,
) -> Values:
    """The number of tokens for which computation takes as long as the traffic."""
    job = job_of(model, num_shards=num_machines * per_machine, **MIXED)
    cluster = Cluster(per_machine, rate, within, between)
    seconds = max(_seconds_of_links(job, cluster).values())
    fewest = math.ceil(seconds * rate / operations(job, 1))
    return {"seconds": seconds, "fewest": fewest, "compute": operations(job, fewest) / rate}


def recomputation(*, model: str = "mpt-7b", num_tokens: int = 4096, rate: float = 150e12) -> Values:
    """The additional operations of activation checkpointing."""
    job = job_of(model, **MIXED)
    kept, again = (operations(job, num_tokens, checkpointing=checkpointing) for checkpointing in (False, True))
    return {"kept": kept / rate, "again": again / rate, "more": again / kept - 1}


def accumulated(
    *,
    model: str = "mpt-7b",
    num_machines: int = 4,
    per_machine: int = 8,
    num_tokens: int = 2048,
    micro_batches: int = 8,
    rate: float = 150e12,
    within: float = 200e9,
    between: float = 3e9,
) -> Values:
    """A step with accumulation in which units stay unsharded and gradients are reduced once."""
    num_ranks = num_machines * per_machine
    base = job_of(model, num_shards=num_ranks, micro_batches=micro_batches, **MIXED)
    cluster = Cluster(per_machine, rate, within, between)
    jobs = {
        "`FULL_SHARD`": base,
        "`FULL_SHARD`, `no_sync()`": replace(base, no_sync=True),
        "`SHARD_GRAD_OP`, `no_sync()`": replace(base, strategy="SHARD_GRAD_OP", no_sync=True),
    }
    rows = []
    for name, job in jobs.items():
        time, peak = step_time(job, operations(job, num_tokens), cluster), cost_of(job).peak
        rows.append([name, *(written("{x:s}", {"x": x}) for x in (time.compute, time.overlapped, time.apart)),
                     written("{x:GB}", {"x": peak})])  # fmt: skip
    return {"table": table(["", "compute", "all overlaps", "nothing overlaps", "peak"], rows, "lr")}


def rate_of_the_network(
    *,
    num_layers: int = 4,
    width: int = 4096,
    num_heads: int = 32,
    vocabulary: int = 32000,
    num_tokens: int = 2048,
    num_ranks: int = 16,
    card: str = "H100",
    rates: tuple[float, ...] = (50e9, 100e9, 200e9, 400e9),
) -> Values:
    """A simulated step with networks of several rates."""
    setup = _small(num_layers, width, num_heads, vocabulary, num_tokens, num_ranks)
    rows = []
    for rate in rates:
        run = simulated(setup, card, rate)
        share = run.exposed_seconds / run.seconds
        figures = {"rate": rate, "step": run.seconds, "waits": run.exposed_seconds, "share": share}
        rows.append([written(cell, figures) for cell in ("{rate:GB/s}", "{step:ms}", "{waits:ms}", "{share:%}")])
    compute = simulated(setup, card, max(rates)).compute_seconds
    return {"table": table(["network of a machine", "step", "waits", "share"], rows, "r"), "compute": compute}


def without_prefetch(
    *,
    num_layers: int = 4,
    width: int = 4096,
    num_heads: int = 32,
    vocabulary: int = 32000,
    num_tokens: int = 2048,
    num_ranks: int = 16,
    card: str = "H100",
    rate: float = 400e9,
) -> Values:
    """The same step with and without prefetching in backward."""
    setup = _small(num_layers, width, num_heads, vocabulary, num_tokens, num_ranks)
    first = simulated(setup, card, rate)
    second = simulated(replace(setup, backward_prefetch=None), card, rate)
    return {"before": first.seconds, "without": second.seconds, "more": second.seconds / first.seconds - 1,
            "memory": first.peak_held, "memory_without": second.peak_held}  # fmt: skip


def without_limiter(
    *,
    num_layers: int = 4,
    width: int = 4096,
    num_heads: int = 32,
    vocabulary: int = 32000,
    num_tokens: int = 2048,
    num_ranks: int = 16,
    card: str = "H100",
    rate: float = 100e9,
) -> Values:
    """The memory of a step without the rate limiter."""
    setup = _small(num_layers, width, num_heads, vocabulary, num_tokens, num_ranks)
    first = simulated(setup, card, rate)
    second = simulated(replace(setup, limit_all_gathers=False), card, rate)
    return {"held": first.peak_held, "without": second.peak_held, "more": second.peak_held - first.peak_held,
            "seconds": first.seconds, "seconds_without": second.seconds,
            "allocated": second.peak_allocated}  # fmt: skip


def _small(num_layers: int, width: int, num_heads: int, vocabulary: int, num_tokens: int, num_ranks: int) -> Setup:
    """A small model with large matrices, with the wrapper."""
    shape = Shape(num_layers, width, num_heads, vocabulary, biases=False, rms=True)
    return Setup(shape, num_ranks=num_ranks, api="fsdp1", sequence=num_tokens)


def _seconds_of_links(job: Job, cluster: Cluster) -> dict[str, float]:
    links = sent_by_link(job, cluster.per_machine).values()
    return {
        "the links within a machine": sum(sent.within for sent in links) / cluster.within,
        "the links between machines": sum(sent.between for sent in links) / cluster.between,
    }
