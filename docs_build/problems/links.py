"""The answers of the chapter "Bytes on a link", computed by the calculator. The text is in ``links.md``."""

from dataclasses import replace

import torch

from docs_build.problems.models import MIXED, job_of
from docs_build.problems.writing import Givens, Values
from docs_build.reading.text import table
from minifsdp_tools.cost import Job, cost_of, sent_by_link
from minifsdp_tools.formulas import ring_all_reduce_sends, ring_sends, size_of
from minifsdp_tools.links import Sent


def ring(g: Givens) -> Values:
    """An all-gather and an all-reduce of one unit."""
    return {"sent": ring_sends(g.size, g.num_ranks), "all_reduce": ring_all_reduce_sends(g.size, g.num_ranks)}


def against_ddp(g: Givens) -> Values:
    """The traffic of a step with three strategies, everything in float32."""
    job = Job(units=[[(g.num_parameters,)]], num_shards=g.num_ranks)
    jobs = [job, replace(job, strategy="SHARD_GRAD_OP"), replace(job, strategy="NO_SHARD", num_replicas=g.num_ranks)]
    full, kept, ddp = (sum(cost_of(one).sent.values()) for one in jobs)
    return {"job": job, "full": full, "kept": kept, "ddp": ddp}


def accumulation(g: Givens) -> Values:
    """Bytes of reduce-scatters with and without ``no_sync``."""
    job = job_of(g.model, num_shards=g.num_ranks, micro_batches=g.micro_batches, **MIXED)
    return {"reduced": cost_of(job).sent, "unreduced": cost_of(replace(job, no_sync=True)).sent}


def leaving_the_machine(g: Givens) -> Values:
    """Bytes that leave a machine, with one copy of the model or one on each machine."""
    full = job_of(g.model, num_shards=g.num_machines * g.per_machine, **MIXED)
    hybrid = replace(full, strategy="HYBRID_SHARD", num_shards=g.per_machine, num_replicas=g.num_machines)
    jobs = {"full": full, "hybrid": hybrid}
    jobs |= {f"narrow_{name}": replace(job, reduce=torch.bfloat16) for name, job in jobs.items()}
    return {name: _sent(job, g.per_machine) for name, job in jobs.items()}


def _sent(job: Job, per_machine: int) -> Sent:
    """The sum over all kinds of collectives."""
    links = sent_by_link(job, per_machine).values()
    return Sent(sum(sent.within for sent in links), sum(sent.between for sent in links))


def smaller_mesh(g: Givens) -> Values:
    """``reshard_after_forward`` with the number of ranks of a machine."""
    job = job_of(g.model, num_shards=g.num_machines * g.per_machine, per_parameter=True, root_frees=False, **MIXED)
    smaller = replace(job, reshards_to=g.per_machine)
    full, less = (sent_by_link(one, g.per_machine)["AG"].between for one in (job, smaller))
    return {"full": full, "smaller": less, "kept": smaller.to_smaller_mesh}


def number_of_collectives(g: Givens) -> Values:
    """The collectives of a step, with a unit for each block and for several blocks."""
    rows = []
    for blocks in (1, g.grouped):
        job = job_of(g.model, blocks, num_shards=g.num_ranks)
        cost = cost_of(job)
        numbers = [cost.num_collectives[kind] for kind in ("AG", "RS")]
        rows.append([blocks, len(job.units), *numbers, size_of(sum(cost.sent.values()))])
    return {"table": table(["blocks in a unit", "units", "all-gathers", "reduce-scatters", "sent"], rows, "r")}


def width_of_a_reduction(g: Givens) -> Values:
    """The traffic with two choices of ``reduce_dtype``."""
    wide = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    jobs = {"wide": wide, "narrow": replace(wide, reduce=torch.bfloat16)}
    return {**jobs, **{f"sent_{name}": cost_of(job).sent for name, job in jobs.items()}}


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
    return {"job": job, "sent": cost_of(job).sent, "flat": cost_of(replace(job, per_parameter=False)).sent}
