"""Peak memory of a step: the most bytes, in addition to the stored ones, in forward and in backward.

A peak is the maximum over all units of the bytes that exist while the unit computes. Both functions iterate over the
units, add up these bytes for each, and return the largest sum.

Worked example, the backward of four units of 4000 bytes on two ranks, without prefetching, everything in float32::

    unit   gathered   its gradient   reduction of the unit before   reduced already    together
    3      4000       4000           0                              0                   8 000
    2      4000       4000           4000 + 2000                    0                  14 000
    1      4000       4000           4000 + 2000                    2000               16 000
    0      4000       4000           4000 + 2000                    4000               18 000

Without overlap of reductions the fourth column is 0, and its reduced shard is already in the next column. The peak is
then 14 000, in the last line.

A reduction is the largest item in flight. NCCL needs its input and its output. Between CPUs, minifsdp sends the
messages itself and also needs buffers for the shards from the other ranks, until they are added. The first one arrives
in the output buffer. The same unit of 4000 bytes on four ranks, with shards of 1000 bytes::

    input 4000, output 1000, and two more buffers for the three received shards: 2000      together 7000

*In torch:* no such calculation; ``_memory_viz`` draws the recorded allocations of a run.

Spec: COST-03, COST-07, COST-08, COST-19 to COST-21.
"""

from minifsdp_tools.job import Job


def peak_of_forward(job: Job) -> float:
    """Bytes of unsharded parameters and activations in forward (COST-03). The root's own parameters always count."""
    if job.is_borrowed:
        return job.kept()
    root, *sizes = job.sizes
    copies = 2 if job.sorts else 1
    moments = [
        copies * root + job.kept(0),
        root + (sum(sizes) if job.keeps else 0.0) + job.kept(),
    ]
    for i, size in enumerate(sizes):
        earlier = sum(sizes[:i]) if job.keeps else 0.0
        coming = sum(sizes[i + 1 : i + 2]) if job.forward_prefetch else 0.0
        moments.append(root + earlier + copies * size + coming + job.kept(i + 1))
    return job.to_smaller_mesh + max(moments)


def peak_of_backward(job: Job, number: int) -> float:
    """Peak bytes, without the stored ones, in the backward of micro-batch ``number`` (COST-03, COST-07, COST-08)."""
    # The root's unit is the last one, if it has parameters of its own.
    indices = range(0 if job.sizes[0] else 1, len(job.sizes))
    return job.to_smaller_mesh + max(
        (_peak_of_unit(job, i, number) for i in indices), default=job.kept(0)
    )


def _peak_of_unit(job: Job, i: int, number: int) -> float:
    """Peak bytes while the gradient of unit ``i`` is computed and its reduction is issued."""
    others = _other_unsharded(job, i) + _other_gradients(job, i, number) + job.kept(i)
    unsharded = 0.0 if job.is_borrowed else job.sizes[i]
    gradient = job.gradients[i]
    computing = unsharded + max(gradient, _deferred(job, i))
    concatenating = unsharded + 2 * gradient if job.puts_together(i) else 0.0
    if not job.reduces(number):
        return others + max(computing, concatenating)
    # While gradients are computed, the reduction of the previous unit runs. Only its output is left when this unit's
    # gradients are concatenated or packed, which needs two copies of them. When the reduction of this unit has been
    # issued, the output is cast if the stored dtype differs from the reduce dtype.
    last = _reduced_last(job, i)
    previous = sum(job.gradients[last : last + 1]) if job.overlaps else 0.0
    output = _reduced(job, previous) / job.shards
    cast = job.settled(previous) if job.stored.itemsize != job.reduce_width else 0.0
    reducing = _reduction(job, gradient) + cast
    # The gradient is sorted by rank, or cast, into a separate buffer.
    copying = (
        gradient + _reduced(job, gradient)
        if job.sorts or job.reduce_width != job.width
        else 0.0
    )
    return others + max(
        _reduction(job, previous) + computing,
        output + max(concatenating, reducing, copying),
    )


def _deferred(job: Job, i: int) -> float:
    """Bytes of the previous unit if it is frozen and flat: its backward ends only with its input gradients."""
    if (
        job.per_parameter
        or job.keeps
        or i + 1 == len(job.sizes)
        or job.gradients[i + 1]
    ):
        return 0.0
    return job.sizes[i + 1]


def _reduced_last(job: Job, i: int) -> int:
    """The unit that was reduced before unit ``i``: the next one in the order of forward that has a gradient."""
    return next(
        (j for j in range(i + 1, len(job.gradients)) if job.gradients[j]),
        len(job.gradients),
    )


def _reduced(job: Job, size: float) -> float:
    """Bytes in the reduce dtype of a gradient that has ``size`` bytes in the compute dtype."""
    return size * job.reduce_width / job.width


def _reduction(job: Job, size: float) -> float:
    """Bytes of the reduction of a unit of ``size`` bytes: its input, its output, and received shards."""
    unsharded = _reduced(job, size)
    if job.shards == 1:
        return unsharded  # an unsharded gradient is summed in place
    return unsharded + unsharded / job.shards * (
        job.shards - 1 if job.by_messages else 1
    )


def _other_unsharded(job: Job, i: int) -> float:
    """Bytes of the unsharded units other than number ``i``; the root's own parameters stay until the end."""
    if job.is_borrowed or i == 0:
        return 0.0
    if job.keeps:
        return sum(job.sizes[:i])
    return job.sizes[0] + (job.sizes[i - 1] if job.backward_prefetch and i > 1 else 0.0)


def _other_gradients(job: Job, i: int, number: int) -> float:
    """Bytes of gradients that are neither being computed nor being reduced, in the backward of unit ``i``."""
    gradients = job.gradients
    # The gradient of the root is complete only at the end, because some of its parameters are used first in forward.
    root = gradients[0] if i else 0.0
    if number and not job.no_sync:
        return root + job.settled(sum(gradients))
    if not job.reduces(number):
        return root + sum(gradients if number else gradients[i + 1 :])
    unreduced = sum(gradients[: i + 1]) if number else 0.0
    return (
        root
        + unreduced
        + job.settled(sum(gradients[_reduced_last(job, i) + job.overlaps :]))
    )
