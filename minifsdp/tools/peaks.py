"""The worst moments of a step: how many bytes lie beside what is stored, in forward and in backward.

A peak is a maximum over moments, and a moment is a unit at work. Both functions walk over the units, add up what is
there while each of them computes, and take the largest sum.

Worked example, the backward of four units of 4000 bytes on two ranks, without prefetching, everything in float32::

    unit   gathered   its gradient   reduction of the unit before   reduced already    together
    3      4000       4000           0                              0                   8 000
    2      4000       4000           4000 + 2000                    0                  14 000
    1      4000       4000           4000 + 2000                    2000               16 000
    0      4000       4000           4000 + 2000                    4000               18 000

Without overlap of reductions the fourth column is 0 and its pieces have come already: 14 000 at the most, in the last
line.

Of what is in flight a reduction is the most. NCCL needs its input and its output. Between CPUs, where minifsdp sends by
itself, there is room for the pieces of the others as well, until they are added; the first of them comes to where the
result will be. The same unit of 4000 bytes on four ranks, in which a piece has 1000::

    input 4000, output 1000, and of the three pieces that come two elsewhere: 2000      together 7000

*In torch:* nothing of the kind; its ``_memory_viz`` draws what an allocator has done.

Spec: COST-03, COST-07, COST-08, COST-19 to COST-21.
"""

from collections.abc import Sequence

from minifsdp.tools.job import Job


def peak_of_forward(job: Job) -> float:
    """Bytes of gathered parameters, and activations, in forward (COST-03). The root's own come first, and stay."""
    if job.is_borrowed:
        return job.kept()
    root, *sizes = job.sizes
    copies = 2 if job.sorts else 1
    moments = [copies * root + job.kept(0), root + (sum(sizes) if job.keeps else 0.0) + job.kept()]
    for i, size in enumerate(sizes):
        earlier = sum(sizes[:i]) if job.keeps else 0.0
        coming = sum(sizes[i + 1 : i + 2]) if job.forward_prefetch else 0.0
        moments.append(root + earlier + copies * size + coming + job.kept(i + 1))
    return job.rests + max(moments)


def peak_of_backward(job: Job, number: int) -> float:
    """Bytes beside what is stored, at most, in the backward of micro-batch ``number`` (COST-03, COST-07, COST-08)."""
    units = job.sizes
    # The root's unit comes last, if it has parameters of its own.
    at_work = range(0 if units[0] else 1, len(units))
    return job.rests + max((_moment(job, units, i, number) for i in at_work), default=job.kept(0))


def _moment(job: Job, units: Sequence[float], i: int, number: int) -> float:
    """Bytes, at most, while the gradient of unit ``i`` is computed and goes on its way."""
    gradients, last = job.gradients, _reduced_last(job, i)
    here, after = gradients[i], sum(gradients[last : last + 1]) if job.overlaps else 0.0
    beside = _gathered_elsewhere(job, units, i) + _gradients_elsewhere(job, i, number) + job.kept(i)
    gathered = 0.0 if job.is_borrowed else units[i]
    twice = gathered + 2 * here if job.puts_together(i) else 0.0
    if not job.reduces(number):
        return beside + max(gathered + here, twice, gathered + _lingering(job, units, i))
    # While gradients are computed, the reduction of the unit before is under way. Of that a piece is left when they are
    # put together or packed, which makes them be there twice. It is completed when the reduction of this unit has been
    # issued, and cast if it rests in another dtype than it has travelled in.
    left = _piece(job, after)
    cast = job.settled(after) if job.stored.itemsize != job.reduce_width else 0.0
    stages = [
        _reduction(job, after) + gathered + max(here, _lingering(job, units, i)),
        left + twice,
        left + _reduction(job, here) + cast,
    ]
    if job.sorts or job.reduce_width != job.width:
        # Sorted by rank, or cast, into a row of its own.
        stages.append(left + here + here * job.reduce_width / job.width)
    return beside + max(stages)


def _lingering(job: Job, units: Sequence[float], i: int) -> float:
    """Bytes of the unit before, if nothing in it is trained and it is flat: only its inputs tell when it is over."""
    if job.per_parameter or job.keeps or i + 1 == len(units) or job.gradients[i + 1]:
        return 0.0
    return units[i + 1]


def _reduced_last(job: Job, i: int) -> int:
    """Which unit was reduced before unit ``i``: the next one in the order of forward that has a gradient."""
    gradients = job.gradients
    return next((j for j in range(i + 1, len(gradients)) if gradients[j]), len(gradients))


def _reduction(job: Job, size: float) -> float:
    """Bytes of the reduction of a unit that has ``size`` bytes: its input, its output, and what comes to be added."""
    whole = size * job.reduce_width / job.width
    if job.shards == 1:
        return whole  # what is not cut is summed in place
    return whole + _piece(job, size) * (job.shards - 1 if job.by_messages else 1)


def _piece(job: Job, size: float) -> float:
    """Bytes of the output of a reduction."""
    return size * job.reduce_width / job.width / job.shards


def _gathered_elsewhere(job: Job, units: Sequence[float], i: int) -> float:
    """Bytes of the gathered units other than number ``i``; the root's own parameters stay until the end."""
    if job.is_borrowed or i == 0:
        return 0.0
    if job.keeps:
        return sum(units[:i])
    return units[0] + (units[i - 1] if job.backward_prefetch and i > 1 else 0.0)


def _gradients_elsewhere(job: Job, i: int, number: int) -> float:
    """Bytes of gradients that are neither being computed nor under way, in the backward of unit ``i``."""
    units = job.gradients
    # That of the root waits all the time for the part that was used first in forward.
    waiting = units[0] if i else 0.0
    if number and not job.no_sync:
        return waiting + job.settled(sum(units))
    if not job.reduces(number):
        return waiting + sum(units if number else units[i + 1 :])
    unreduced = sum(units[: i + 1]) if number else 0.0
    return waiting + unreduced + job.settled(sum(units[_reduced_last(job, i) + job.overlaps :]))
