"""The answers of the chapter "How long a step is at least". The text is in ``time.md``.

The calculator computes lower bounds. The simulator computes the time of a step from the recorded order of its work.
"""

import math
from dataclasses import replace
from typing import Any

from docs_build.problems.models import MIXED, job_of, num_parameters, simulated
from docs_build.problems.writing import Givens, Values, shown
from docs_build.reading.text import table
from minifsdp_tools.cost import Cluster, Job, cost_of, operations, sent_by_link, step_time
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import Shape


def compute_alone(g: Givens) -> Values:
    """The time of the matrix products."""
    job = job_of(g.model, **MIXED)
    return {"work": operations(job, g.num_tokens), "parameters": num_parameters(job)}


def compute_or_network(g: Givens) -> Values:
    """The bounds of a step, and the resource that decides."""
    job = job_of(g.model, num_shards=g.num_machines * g.per_machine, **MIXED)
    cluster = Cluster(g.per_machine, g.rate, g.within, g.between)
    time = step_time(job, operations(job, g.num_tokens), cluster)
    links = _seconds_of_links(job, cluster)
    slowest = max({"computation": time.compute, **links}.items(), key=lambda one: one[1])[0]
    return {"time": time, "slowest": slowest, "links": links}


def tokens_to_hide(g: Givens) -> Values:
    """The number of tokens for which computation takes as long as the traffic."""
    job = job_of(g.model, num_shards=g.num_machines * g.per_machine, **MIXED)
    cluster = Cluster(g.per_machine, g.rate, g.within, g.between)
    seconds = max(_seconds_of_links(job, cluster).values())
    fewest = math.ceil(seconds * g.rate / operations(job, 1))
    return {"seconds": seconds, "fewest": fewest, "compute": operations(job, fewest) / g.rate}


def recomputation(g: Givens) -> Values:
    """The additional operations of activation checkpointing."""
    job = job_of(g.model, **MIXED)
    kept, again = (operations(job, g.num_tokens, checkpointing=checkpointing) for checkpointing in (False, True))
    return {"kept": kept, "again": again}


def accumulated(g: Givens) -> Values:
    """A step with accumulation in which units stay unsharded and gradients are reduced once."""
    num_ranks = g.num_machines * g.per_machine
    base = job_of(g.model, num_shards=num_ranks, micro_batches=g.micro_batches, **MIXED)
    cluster = Cluster(g.per_machine, g.rate, g.within, g.between)
    jobs = {
        "`FULL_SHARD`": base,
        "`FULL_SHARD`, `no_sync()`": replace(base, no_sync=True),
        "`SHARD_GRAD_OP`, `no_sync()`": replace(base, strategy="SHARD_GRAD_OP", no_sync=True),
    }
    rows = []
    for name, job in jobs.items():
        time, peak = step_time(job, operations(job, g.num_tokens), cluster), cost_of(job).peak
        seconds = [shown(value, "s") for value in (time.compute, time.overlapped, time.apart)]
        rows.append([name, *seconds, shown(peak, "GB")])
    return {"table": table(["", "compute", "all overlaps", "nothing overlaps", "peak"], rows, "lr")}


def rate_of_the_network(g: Givens) -> Values:
    """A simulated step with networks of several rates."""
    setup = _small(g)
    rows = []
    for rate in g.rates:
        run = simulated(setup, g.card, rate)
        times = [shown(run.seconds, "ms"), shown(run.exposed_seconds, "ms")]
        rows.append([shown(rate, "GB_per_s"), *times, shown(run.exposed_seconds / run.seconds, "percent")])
    compute = simulated(setup, g.card, max(g.rates)).compute_seconds
    return {"table": table(["network of a machine", "step", "waits", "share"], rows, "r"), "compute": compute}


def without_prefetch(g: Givens) -> Values:
    """The same step with and without prefetching in backward."""
    return _compared(g, backward_prefetch=None)


def without_limiter(g: Givens) -> Values:
    """The memory of a step without the rate limiter."""
    return _compared(g, limit_all_gathers=False)


def _compared(g: Givens, **changes: Any) -> Values:
    """A simulated step before and after a change of its settings."""
    setups = {"before": _small(g), "without": replace(_small(g), **changes)}
    return {name: simulated(setup, g.card, g.rate) for name, setup in setups.items()}


def _small(g: Givens) -> Setup:
    """A small model with large matrices, with the wrapper."""
    shape = Shape(g.num_layers, g.width, g.num_heads, g.vocabulary, biases=False, rms=True)
    return Setup(shape, num_ranks=g.num_ranks, api="fsdp1", sequence=g.num_tokens)


def _seconds_of_links(job: Job, cluster: Cluster) -> dict[str, float]:
    links = sent_by_link(job, cluster.per_machine).values()
    return {
        "the links within a machine": sum(sent.within for sent in links) / cluster.within,
        "the links between machines": sum(sent.between for sent in links) / cluster.between,
    }
