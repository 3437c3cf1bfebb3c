"""The answers of the chapter "Bytes on a link", computed by the calculator. The text is in ``links.md``."""

from dataclasses import replace

import torch

from docs_build.problems.models import MIXED, job_of
from docs_build.problems.writing import Givens, Values
from docs_build.reading.text import table
from minifsdp_tools.cost import Job, cost_of, sent_by_link
from minifsdp_tools.formulas import ring_all_reduce_sends, ring_sends, size_of


def ring(g: Givens) -> Values:
    """An all-gather and an all-reduce of one unit."""
    sent = ring_sends(g.size, g.num_ranks)
    others = {"steps": g.num_ranks - 1, "shard": g.size / g.num_ranks}
    return {**others, "sent": sent, "share": sent / g.size, "all_reduce": ring_all_reduce_sends(g.size, g.num_ranks)}


def against_ddp(g: Givens) -> Values:
    """The traffic of a step with three strategies, everything in float32."""
    job = Job(units=[[(g.num_parameters,)]], num_shards=g.num_ranks)
    jobs = [job, replace(job, strategy="SHARD_GRAD_OP"), replace(job, strategy="NO_SHARD", num_replicas=g.num_ranks)]
    full, kept, ddp = (sum(cost_of(one).sent.values()) for one in jobs)
    return {"full": full, "kept": kept, "ddp": ddp, "ratio": full / ddp, "model": sum(job.sizes)}


def accumulation(g: Givens) -> Values:
    """Bytes of reduce-scatters with and without ``no_sync``."""
    job = job_of(g.model, num_shards=g.num_ranks, micro_batches=g.micro_batches, **MIXED)
    reduced, unreduced = cost_of(job).sent, cost_of(replace(job, no_sync=True)).sent
    return {
        "gathered": reduced["AG"],
        "gathered_without": unreduced["AG"],
        "reduced": reduced["RS"],
        "without": unreduced["RS"],
        "saved": 1 - sum(unreduced.values()) / sum(reduced.values()),
    }


def leaving_the_machine(g: Givens) -> Values:
    """Bytes that leave a machine, with one copy of the model or one on each machine."""
    full = job_of(g.model, num_shards=g.num_machines * g.per_machine, **MIXED)
    hybrid = replace(full, strategy="HYBRID_SHARD", num_shards=g.per_machine, num_replicas=g.num_machines)
    links = {"full": sent_by_link(full, g.per_machine), "hybrid": sent_by_link(hybrid, g.per_machine)}
    sums = {
        f"{name}_{where}": sum(getattr(sent, where) for sent in of_kind.values())
        for name, of_kind in links.items()
        for where in ("within", "between")
    }
    narrow = (replace(job, reduce=torch.bfloat16) for job in (full, hybrid))
    first, second = (sum(one.between for one in sent_by_link(job, g.per_machine).values()) for job in narrow)
    ratio = sums["full_between"] / sums["hybrid_between"]
    return {**sums, "num_ranks": full.num_shards, "ratio": ratio, "narrow_ratio": first / second}


def smaller_mesh(g: Givens) -> Values:
    """``reshard_after_forward`` with the number of ranks of a machine."""
    job = job_of(g.model, num_shards=g.num_machines * g.per_machine, per_parameter=True, root_frees=False, **MIXED)
    smaller = replace(job, reshards_to=g.per_machine)
    between = [sent_by_link(one, g.per_machine)["AG"].between for one in (job, smaller)]
    return {"full": between[0], "smaller": between[1], "kept": smaller.to_smaller_mesh, "num_ranks": job.num_shards}


def number_of_collectives(g: Givens) -> Values:
    """The collectives of a step, with a unit for each block and for several blocks."""
    jobs = {blocks: job_of(g.model, blocks, num_shards=g.num_ranks) for blocks in (1, g.grouped)}
    costs = {blocks: cost_of(job) for blocks, job in jobs.items()}
    rows = []
    for blocks, cost in costs.items():
        numbers = cost.num_collectives
        sent = size_of(sum(cost.sent.values()))
        rows.append([blocks, len(jobs[blocks].units), numbers["AG"], numbers["RS"], sent])
    return {"table": table(["blocks in a unit", "units", "all-gathers", "reduce-scatters", "sent"], rows, "r")}


def width_of_a_reduction(g: Givens) -> Values:
    """The traffic with two choices of ``reduce_dtype``."""
    wide = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    narrow = replace(wide, reduce=torch.bfloat16)
    first, second = cost_of(wide).sent, cost_of(narrow).sent
    return {
        "gathered": first["AG"],
        "wide": first["RS"],
        "narrow": second["RS"],
        "width": wide.reduce_width,
        "narrow_width": narrow.reduce_width,
        "saved": 1 - sum(second.values()) / sum(first.values()),
    }


def adapters(g: Givens) -> Values:
    """A frozen model with trained adapters."""
    frozen, trained = [(g.width, g.width)] * g.num_matrices, [(g.rank, g.width), (g.width, g.rank)] * g.num_matrices
    job = Job(
        units=[[*frozen, *trained]] * g.num_blocks,
        trained=[[], *[trained] * g.num_blocks],
        num_shards=g.num_ranks,
        per_parameter=True,
        stored=torch.bfloat16,
    )
    cost, flat = cost_of(job), cost_of(replace(job, per_parameter=False))
    sums = {"elements": sum(job.sizes) / job.width, "trained": sum(job.gradients) / job.width}
    return {**sums, "gathered": cost.sent["AG"], "reduced": cost.sent["RS"], "flat": flat.sent["RS"],
            "share": sums["trained"] / sums["elements"], "times": flat.sent["RS"] / cost.sent["RS"]}  # fmt: skip
