"""Where a job's bytes go, and how long a step takes at least.

A rank sends to its neighbours in the same machine over links of hundreds of gigabytes per second, and to other machines
over a network that has a tenth of it. So the sum of all that is sent says little; what leaves the machine decides.

Ranks are numbered machine by machine, and a collective is a ring through its ranks in that order. Worked example, four
ranks on two machines, and what each hop of a ring crosses::

    FULL_SHARD     one ring     0 > 1 | 2 > 3 | 0      2 hops of 4 leave a machine: a half of what is sent
    HYBRID_SHARD   two rings    0 > 1 > 0, 2 > 3 > 2   gathers and reduce-scatters: none
                   two rings    0 | 2 | 0, 1 | 3 | 1   all-reduces of a piece each: all of it

A rank at the border sends all of its part across and a rank in the middle nothing. NCCL lays several rings, so that
each GPU is at a border once; the numbers are therefore the mean over the ranks of a machine. Papers often count every
byte of a ring through several machines as if it left its machine, which is `per_machine` times as much.

A step takes, at least and on paper::

    compute          operations / (operations per second)
    one collective   max(bytes within / bandwidth within, bytes between / bandwidth between)
    overlapped       max(compute, all bytes within / bandwidth, all bytes between / bandwidth)
    apart            compute + the sum over the collectives

No step that sends by rings is faster than the first of the two last lines; switches that add up by themselves send
less. One in which nothing runs beside anything else is not faster than the second. Latency is not in it, nor are the
optimizer's step and whatever is bound by the memory's bandwidth.

*In torch:* nothing of the kind.

Spec: COST-15, COST-18.
"""

from dataclasses import dataclass

from minifsdp.tools.cost import sent_bytes, sent_for_rested
from minifsdp.tools.job import Job

__all__ = ["Cluster", "Sent", "StepTime", "sent_by_link", "step_time"]


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Attributes:
        per_machine: ranks on each.
        operations: additions and multiplications that a rank does in a second.
        within: bytes that a rank sends in a second to ranks of its machine.
        between: bytes that a rank sends in a second to other machines.
    """

    per_machine: int
    operations: float
    within: float
    between: float


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in a step, the mean over the ranks of a machine: within it, and to other machines."""

    within: float
    between: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, at least.

    Attributes:
        compute: of forward and backward.
        communication: of all collectives, one after the other.
        overlapped: of the whole, if everything runs beside everything else.
        apart: of the whole, if nothing does.
    """

    compute: float
    communication: float
    overlapped: float
    apart: float


def sent_by_link(job: Job, per_machine: int) -> dict[str, Sent]:
    """What is sent by kind of collective, within machines and between them (COST-15)."""
    sent, rested = sent_bytes(job), sent_for_rested(job)
    num_ranks = job.shards * job.num_replicas
    # Of each ring: what a rank sends in it, how many ranks are in it, and how far they are apart.
    rings = {
        "AG": [(sent["AG"] - rested, job.shards, 1), (rested, job.rests_with or 1, 1)],
        "RS": [(sent["RS"], job.shards, 1)],
        "AR": [(sent["AR"], job.num_replicas, job.shards)],
    }
    found = {}
    for kind, of_kind in rings.items():
        between = sum(num_bytes * _leaving(num_ranks, size, apart, per_machine) for num_bytes, size, apart in of_kind)
        found[kind] = Sent(sent[kind] - between, between)
    return found


def _leaving(num_ranks: int, size: int, apart: int, per_machine: int) -> float:
    """The share of all hops that leads to another machine, of rings of ``size`` ranks that are ``apart``."""

    def following(rank: int) -> int:
        span = size * apart
        start = rank // span * span
        return start + (rank - start + apart) % span

    hops = sum(rank // per_machine != following(rank) // per_machine for rank in range(num_ranks))
    return hops / num_ranks


def step_time(job: Job, operations: float, cluster: Cluster) -> StepTime:
    """How long a step takes at least (COST-18).

    Args:
        job: what is trained, and how.
        operations: of a rank in a step; `operations` of ``activations.py`` has those of matrix products.
        cluster: the machines.
    """
    links = sent_by_link(job, cluster.per_machine).values()
    compute = operations / cluster.operations
    # A ring is as slow as its slowest link.
    communication = sum(max(sent.within / cluster.within, sent.between / cluster.between) for sent in links)
    within = sum(sent.within for sent in links) / cluster.within
    between = sum(sent.between for sent in links) / cluster.between
    return StepTime(compute, communication, max(compute, within, between), compute + communication)
