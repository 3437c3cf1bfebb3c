"""The answers of the chapter "Memory", computed by the calculator. The text is in ``memory.md``."""

import itertools
from dataclasses import replace
from math import prod

from docs_build.problems.models import MIXED, job_of, num_parameters
from docs_build.problems.writing import Givens, Values
from minifsdp_tools.cost import Job, activation_bytes, cost_of
from minifsdp_tools.formulas import padded_flat, padded_per_parameter


def replica(g: Givens) -> Values:
    """A model in float32 and Adam on each rank."""
    job = Job(units=[[(g.num_parameters,)]], strategy="NO_SHARD", num_replicas=g.num_ranks, optimizer=g.state)
    return {"job": job, "held": cost_of(job).after_backward}


def shard_of_adam(g: Givens) -> Values:
    """The same with ``FULL_SHARD``."""
    job = Job(units=[[(g.num_parameters,)]], num_shards=g.num_ranks, optimizer=g.state)
    return {"job": job, "cost": cost_of(job)}


def fewest_ranks(g: Givens) -> Values:
    """The number of ranks whose memories hold the model states."""

    def held(num_ranks: int) -> float:
        return cost_of(Job(units=[[(g.num_parameters,)]], num_shards=num_ranks, optimizer=g.state)).after_backward

    return {"held": held, "fewest": next(num for num in itertools.count(1) if held(num) <= g.memory)}


def padded_shard(g: Givens) -> Values:
    """Padding in both layouts."""
    shapes = [g.weight, g.bias]
    rows = [padded_per_parameter([shape], g.num_ranks) // prod(shape[1:]) for shape in shapes]
    padded = {"flat": padded_flat(shapes, g.num_ranks), "each": padded_per_parameter(shapes, g.num_ranks)}
    return {"numel": sum(map(prod, shapes)), "rows": rows, **padded}


def unsharded_in_forward(g: Givens) -> Values:
    """The unsharded parameters in forward, with a unit for each block."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    return {"job": job, "cost": cost_of(job)}


def one_unit(g: Givens) -> Values:
    """The same with one unit for the whole model."""
    blocks = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    every = [shape for shapes in [blocks.root, *blocks.units] for shape in shapes]
    costs = {"blocks": cost_of(blocks), "one": cost_of(replace(blocks, units=[], root=every))}
    return {name: cost.peak_forward - cost.stored for name, cost in costs.items()}


def kept_for_backward(g: Givens) -> Values:
    """Forward with ``SHARD_GRAD_OP``."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    kept = cost_of(replace(job, strategy="SHARD_GRAD_OP"))
    return {"job": job, "num_parameters": num_parameters(job), "full": cost_of(job), "kept": kept}


def narrow_compute(g: Givens) -> Values:
    """The effect of ``param_dtype=torch.bfloat16`` on memory."""
    jobs = {"wide": job_of(g.model, num_shards=g.num_ranks), "narrow": job_of(g.model, num_shards=g.num_ranks, **MIXED)}
    return {**jobs, "before": cost_of(jobs["wide"]), "after": cost_of(jobs["narrow"])}


def unreduced_gradients(g: Givens) -> Values:
    """Accumulation with and without ``no_sync``."""
    job = job_of(g.model, num_shards=g.num_ranks, micro_batches=g.micro_batches, **MIXED)
    return {"job": job, "reduced": cost_of(job), "unreduced": cost_of(replace(job, no_sync=True))}


def offloaded(g: Givens) -> Values:
    """Shards on the host."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    return {"num_parameters": num_parameters(job), "card": cost_of(job), "host": cost_of(replace(job, offload=True))}


def checkpointed(g: Givens) -> Values:
    """Activations with and without checkpointing."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    kept, again = (activation_bytes(job, g.num_tokens, checkpointing=checkpointing) for checkpointing in (False, True))
    return {"job": job, "kept": kept, "again": again}
