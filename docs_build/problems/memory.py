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
    held = cost_of(job).after_backward
    return {"held": held, "width": job.width, "each": held / g.num_parameters}


def shard_of_adam(g: Givens) -> Values:
    """The same with ``FULL_SHARD``."""
    job = Job(units=[[(g.num_parameters,)]], num_shards=g.num_ranks, optimizer=g.state)
    cost = cost_of(job)
    parts = {"weights": job.parameter_bytes, "states": job.optimizer_bytes, "stored": cost.stored}
    return {**parts, "gradients": cost.after_backward - cost.stored, "held": cost.after_backward}


def fewest_ranks(g: Givens) -> Values:
    """The number of ranks whose memories hold the model states."""

    def held(num_ranks: int) -> float:
        return cost_of(Job(units=[[(g.num_parameters,)]], num_shards=num_ranks, optimizer=g.state)).after_backward

    fewest = next(num for num in itertools.count(1) if held(num) <= g.memory)
    return {"total": held(1), "fewest": fewest, "held": held(fewest), "fewer": fewest - 1, "more": held(fewest - 1)}


def padded_shard(g: Givens) -> Values:
    """Padding in both layouts."""
    shapes = [g.weight, g.bias]
    numel = sum(map(prod, shapes))
    flat, each = padded_flat(shapes, g.num_ranks), padded_per_parameter(shapes, g.num_ranks)
    rows = [padded_per_parameter([shape], g.num_ranks) // prod(shape[1:]) for shape in shapes]
    return {
        "numel": numel,
        "flat": flat,
        "of_flat": flat // g.num_ranks,
        "added_flat": flat - numel,
        "each": each,
        "of_each": each // g.num_ranks,
        "added_each": each - numel,
        "weight_rows": rows[0],
        "bias_rows": rows[1],
    }


def unsharded_in_forward(g: Givens) -> Values:
    """The unsharded parameters in forward, with a unit for each block."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    cost = cost_of(job)
    sizes = {"root": job.sizes[0], "block": max(job.sizes[1:]), "num_blocks": len(job.units)}
    return {**sizes, "peak": cost.peak_forward - cost.stored, "whole": sum(job.sizes), "stored": cost.stored}


def one_unit(g: Givens) -> Values:
    """The same with one unit for the whole model."""
    blocks = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    every = [shape for shapes in [blocks.root, *blocks.units] for shape in shapes]
    whole = replace(blocks, units=[], root=every)
    costs = {"blocks": cost_of(blocks), "one": cost_of(whole)}
    peaks = {name: cost.peak_forward - cost.stored for name, cost in costs.items()}
    return {**peaks, "ratio": peaks["one"] / peaks["blocks"]}


def kept_for_backward(g: Givens) -> Values:
    """Forward with ``SHARD_GRAD_OP``."""
    jobs = {
        name: job_of(g.model, num_shards=g.num_ranks, strategy=name, **MIXED)
        for name in ("FULL_SHARD", "SHARD_GRAD_OP")
    }
    full, kept = (cost_of(job) for job in jobs.values())
    return {
        "num_parameters": num_parameters(jobs["FULL_SHARD"]),
        "width": jobs["FULL_SHARD"].width,
        "stored": full.stored,
        "same": "the same" if full.stored == kept.stored else "a different",
        "full": full.peak_forward,
        "kept": kept.peak_forward,
        "more": kept.peak_forward - full.peak_forward,
    }


def narrow_compute(g: Givens) -> Values:
    """The effect of ``param_dtype=torch.bfloat16`` on memory."""
    wide, narrow = job_of(g.model, num_shards=g.num_ranks), job_of(g.model, num_shards=g.num_ranks, **MIXED)
    first, second = cost_of(wide), cost_of(narrow)
    return {
        "stored": first.stored,
        "stored_narrow": second.stored,
        "wide": wide.width,
        "narrow": narrow.width,
        "block": max(wide.sizes[1:]),
        "block_narrow": max(narrow.sizes[1:]),
        "forward": first.peak_forward - first.stored,
        "forward_narrow": second.peak_forward - second.stored,
    }


def unreduced_gradients(g: Givens) -> Values:
    """Accumulation with and without ``no_sync``."""
    job = job_of(g.model, num_shards=g.num_ranks, micro_batches=g.micro_batches, **MIXED)
    reduced, unreduced = cost_of(job), cost_of(replace(job, no_sync=True))
    return {
        "gradients": sum(job.gradients),
        "shard": job.settled(sum(job.gradients)),
        "width": job.width,
        "with_sync": reduced.peak_backward,
        "without": unreduced.peak_backward,
        "more": unreduced.peak_backward - reduced.peak_backward,
    }


def offloaded(g: Givens) -> Values:
    """Shards on the host."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    there, away = cost_of(job), cost_of(replace(job, offload=True))
    return {"stored": there.stored, "left": away.stored, "host": away.host, "of_machine": away.host * g.num_ranks,
            "peak": there.peak, "peak_offloaded": away.peak, "num_parameters": num_parameters(job)}  # fmt: skip


def checkpointed(g: Givens) -> Values:
    """Activations with and without checkpointing."""
    job = job_of(g.model, num_shards=g.num_ranks, **MIXED)
    kept, again = (activation_bytes(job, g.num_tokens, checkpointing=checkpointing) for checkpointing in (False, True))
    return {"kept": kept, "again": again, "ratio": kept / again, "width": job.width, "num_blocks": len(job.units)}
