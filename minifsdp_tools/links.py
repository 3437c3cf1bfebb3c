"""Traffic of a step, within and between machines, and a lower bound for the time of a step.

Ranks of one machine are connected by links of hundreds of gigabytes per second. The network between machines has about
a tenth of that bandwidth. So the bytes that leave a machine usually determine the time, and not the sum of all bytes.

Ranks are numbered machine by machine, and a collective is a ring through its ranks in that order. Worked example, four
ranks on two machines, and the hops of each ring (``|`` is a hop between machines)::

    FULL_SHARD     one ring     0 > 1 | 2 > 3 | 0      2 hops of 4 leave a machine: half of the traffic
    HYBRID_SHARD   two rings    0 > 1 > 0, 2 > 3 > 2   all-gathers and reduce-scatters: none
                   two rings    0 | 2 | 0, 1 | 3 | 1   all-reduces of one shard each: all of it

The rank at the end of a machine sends all of its bytes to another machine, and the others send none. NCCL builds
several rings, and each GPU is at the end in one of them. So the numbers are means over the ranks of a machine. Papers
often count every byte of a ring through several machines as leaving its machine, `per_machine` times as much.

Between CPUs, minifsdp sends each shard directly to every other rank (``by_messages`` of a `Job`, see
``minifsdp_gloo``). Then a rank sends to 2 of 3 other ranks on the other machine: two thirds of its all-gathers and
reduce-scatters leave the machine, and not a half. All-reduces are rings of gloo.

Lower bounds for the time of a step::

    compute          operations / (operations per second)
    one collective   max(bytes within / bandwidth within, bytes between / bandwidth between)
    overlapped       max(compute, all bytes within / bandwidth, all bytes between / bandwidth)
    apart            compute + the sum over the collectives

With rings, no step is faster than `overlapped`; switches that reduce in the network send less. Without any overlap, no
step is faster than `apart`. Not included: latency, the optimizer's step, and operations that are limited by memory
bandwidth.

*In torch:* nothing comparable.

Spec: COST-15, COST-18, MACHINES-04, MACHINES-05.
"""

from dataclasses import dataclass

from minifsdp_tools.formulas import ring_all_reduce_sends, ring_sends
from minifsdp_tools.job import Job


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Attributes:
        per_machine: ranks on each machine.
        operations: additions and multiplications per second of one rank.
        within: bytes per second that a rank sends to ranks on its machine.
        between: bytes per second that a rank sends to other machines.
    """

    per_machine: int
    operations: float
    within: float
    between: float


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in a step, within its machine and to others; the mean over a machine's ranks."""

    within: float
    between: float


@dataclass(frozen=True)
class StepTime:
    """Lower bounds in seconds for a step.

    Attributes:
        compute: of forward and backward.
        communication: of all collectives, one after the other.
        overlapped: of the step, if all communication and computation overlap.
        apart: of the step, without any overlap.
    """

    compute: float
    communication: float
    overlapped: float
    apart: float


def _gathers(job: Job) -> tuple[int, int]:
    """The number of all-gathers per step of a unit, and of the root's own parameters."""
    if job.shards == 1:
        return 0, 0
    if job.keeps:
        # Without synchronization, units stay unsharded until the last backward, the one that reduces.
        return job.num_reductions, job.num_reductions
    return 2 * job.micro_batches, job.micro_batches * (2 if job.root_frees else 1)


def sent_bytes(job: Job) -> dict[str, float]:
    """Bytes that each rank sends in a step, by kind of collective (COST-06 to COST-08)."""
    times, of_root = _gathers(job)
    gathered = times * sum(job.sizes[1:]) + of_root * job.sizes[0] - job.in_smaller_mesh
    reduced = job.num_reductions * sum(job.gradients) * job.reduce_width / job.width
    return {
        "AG": ring_sends(gathered, job.shards) + job.sent_in_smaller_mesh,
        "RS": ring_sends(reduced, job.shards),
        "AR": ring_all_reduce_sends(reduced / job.shards, job.num_replicas),
    }


def num_collectives(job: Job) -> dict[str, int]:
    """Collectives of a step, by kind (SHARD-16)."""
    times, of_root = _gathers(job)
    reductions = job.num_reductions * sum(1 for gradient in job.gradients if gradient)
    return {
        "AG": times * len(job.units) + (of_root if job.root else 0),
        "RS": reductions if job.shards > 1 else 0,
        "AR": reductions if job.num_replicas > 1 else 0,
    }


def sent_by_link(job: Job, per_machine: int) -> dict[str, Sent]:
    """Bytes sent by kind of collective, within machines and between them (COST-15, MACHINES-05)."""
    sent = sent_bytes(job)
    in_smaller_mesh = job.sent_in_smaller_mesh
    num_ranks = job.shards * job.num_replicas
    # For each ring: the bytes that a rank sends in it, its number of ranks, and the distance between them.
    rings = {
        "AG": [
            (sent["AG"] - in_smaller_mesh, job.shards, 1),
            (in_smaller_mesh, job.reshards_to or 1, 1),
        ],
        "RS": [(sent["RS"], job.shards, 1)],
        "AR": [(sent["AR"], job.num_replicas, job.shards)],
    }
    found = {}
    for kind, of_kind in rings.items():
        direct = job.by_messages and kind != "AR"
        between = sum(
            num * _leaving(num_ranks, size, apart, per_machine, direct)
            for num, size, apart in of_kind
        )
        found[kind] = Sent(sent[kind] - between, between)
    return found


def _leaving(
    num_ranks: int, size: int, apart: int, per_machine: int, direct: bool
) -> float:
    """The fraction of messages between machines, in groups of ``size`` ranks at a distance of ``apart`` ranks.

    Args:
        num_ranks, size, apart, per_machine: numbers of ranks.
        direct: whether each rank sends to all others of its group, and not only to the next one of a ring.
    """
    # Groups of neighboring ranks together span this number of ranks.
    span = size * apart
    distances = range(1, size if direct and size > 1 else 2)
    pairs = [
        (rank, rank - rank % span + (rank + far * apart) % span)
        for rank in range(num_ranks)
        for far in distances
    ]
    return sum(
        rank // per_machine != other // per_machine for rank, other in pairs
    ) / len(pairs)


def step_time(job: Job, operations: float, cluster: Cluster) -> StepTime:
    """A lower bound for the time of a step (COST-18).

    Args:
        job: the model and the choices.
        operations: per rank and step; `operations` of ``activations.py`` returns those of matrix products.
        cluster: the machines.
    """
    links = sent_by_link(job, cluster.per_machine).values()
    compute = operations / cluster.operations
    # A ring is as slow as its slowest link.
    communication = sum(
        max(sent.within / cluster.within, sent.between / cluster.between)
        for sent in links
    )
    within = sum(sent.within for sent in links) / cluster.within
    between = sum(sent.between for sent in links) / cluster.between
    return StepTime(
        compute, communication, max(compute, within, between), compute + communication
    )
