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

from collections.abc import Sequence

from minifsdp.tools.job import Job


def peak_of_forward(job: Job) -> float:
    """Bytes of unsharded parameters and activations in forward (COST-03). The root's own stay from the start."""
    if job.is_borrowed:
        return job.kept()
    root, *sizes = job.sizes
    copies = 2 if job.sorts else 1
    moments = [copies * root + job.kept(0), root + (sum(sizes) if job.keeps else 0.0) + job.kept()]
    for i, size in enumerate(sizes):
        earlier = sum(sizes[:i]) if job.keeps else 0.0
        coming = sum(sizes[i + 1 : i + 2]) if job.forward_prefetch else 0.0
        moments.append(root + earlier + copies * size + coming + job.kept(i + 1))
    return job.to_smaller_mesh + max(moments)


def peak_of_backward(job: Job, number: int) -> float:
    """Peak bytes, without the stored ones, in the backward of micro-batch ``number`` (COST-03, COST-07, COST-08)."""
    units = job.sizes
    # The root's unit is the last one, if it has parameters of its own.
    at_work = range(0 if units[0] else 1, len(units))
    return job.to_smaller_mesh + max((_moment(job, units, i, number) for i in at_work), default=job.kept(0))


def _moment(job: Job, units: Sequence[float], i: int, number: int) -> float:
    """Peak bytes while the gradient of unit ``i`` is computed and its reduction is issued."""
    gradients, last = job.gradients, _reduced_last(job, i)
    here, after = gradients[i], sum(gradients[last : last + 1]) if job.overlaps else 0.0
    beside = _gathered_elsewhere(job, units, i) + _gradients_elsewhere(job, i, number) + job.kept(i)
    gathered = 0.0 if job.is_borrowed else units[i]
    twice = gathered + 2 * here if job.puts_together(i) else 0.0
    if not job.reduces(number):
        return beside + max(gathered + here, twice, gathered + _deferred(job, units, i))
    # While gradients are computed, the reduction of the previous unit runs. Only its output is left when this unit's
    # gradients are concatenated or packed, which needs them twice. It is completed when the reduction of this unit has
    # been issued, and cast if the stored dtype differs from the reduce dtype.
    left = _local_shard(job, after)
    cast = job.settled(after) if job.stored.itemsize != job.reduce_width else 0.0
    stages = [
        _reduction(job, after) + gathered + max(here, _deferred(job, units, i)),
        left + twice,
        left + _reduction(job, here) + cast,
    ]
    if job.sorts or job.reduce_width != job.width:
        # Sorted by rank, or cast, into a separate buffer.
        stages.append(left + here + here * job.reduce_width / job.width)
    return beside + max(stages)


def _deferred(job: Job, units: Sequence[float], i: int) -> float:
    """Bytes of the previous unit if it is frozen and flat: its backward ends only with its input gradients."""
    if job.per_parameter or job.keeps or i + 1 == len(units) or job.gradients[i + 1]:
        return 0.0
    return units[i + 1]


def _reduced_last(job: Job, i: int) -> int:
    """The unit that was reduced before unit ``i``: the next one in the order of forward that has a gradient."""
    gradients = job.gradients
    return next((j for j in range(i + 1, len(gradients)) if gradients[j]), len(gradients))


def _reduction(job: Job, size: float) -> float:
    """Bytes of the reduction of a unit of ``size`` bytes: its input, its output, and received shards."""
    whole = size * job.reduce_width / job.width
    if job.shards == 1:
        return whole  # an unsharded gradient is summed in place
    return whole + _local_shard(job, size) * (job.shards - 1 if job.by_messages else 1)


def _local_shard(job: Job, size: float) -> float:
    """Bytes of the output of a reduction."""
    return size * job.reduce_width / job.width / job.shards


def _gathered_elsewhere(job: Job, units: Sequence[float], i: int) -> float:
    """Bytes of the unsharded units other than number ``i``; the root's own parameters stay until the end."""
    if job.is_borrowed or i == 0:
        return 0.0
    if job.keeps:
        return sum(units[:i])
    return units[0] + (units[i - 1] if job.backward_prefetch and i > 1 else 0.0)


def _gradients_elsewhere(job: Job, i: int, number: int) -> float:
    """Bytes of gradients that are neither being computed nor being reduced, in the backward of unit ``i``."""
    units = job.gradients
    # The gradient of the root is complete only at the end, because some of its parameters are used first in forward.
    waiting = units[0] if i else 0.0
    if number and not job.no_sync:
        return waiting + job.settled(sum(units))
    if not job.reduces(number):
        return waiting + sum(units if number else units[i + 1 :])
    unreduced = sum(units[: i + 1]) if number else 0.0
    return waiting + unreduced + job.settled(sum(units[_reduced_last(job, i) + job.overlaps :]))
