"""Bytes sent over each kind of link, counted hop by hop in recorded collectives, and the minimum time of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp_tools.cost import Cluster, Job, Sent, cost_of, sent_by_link, step_time
from spec_tests.harness import ranks
from spec_tests.subject import trace
from spec_tests.tools.test_cost import JOB, one_step, wrapped

PER_MACHINE, KINDS = 2, ("AG", "RS", "AR")


def measured(job: Job) -> dict[str, Sent]:
    """Bytes sent within machines and between them, by kind: the mean over all ranks.

    Each collective is a ring in the order of ranks.
    """
    model, rank = wrapped(job), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace.record() as recorder:
        one_step(model, optimizer, job)
    links = torch.zeros(3, 2, dtype=torch.float64)
    for event in recorder.events:
        if event.kind in KINDS:
            size = len(event.ranks)
            receiver = event.ranks[(event.ranks.index(rank) + 1) % size]
            is_between = rank // PER_MACHINE != receiver // PER_MACHINE
            times = 2 if event.kind == "AR" else 1
            links[KINDS.index(event.kind), int(is_between)] += times * event.num_bytes * (size - 1) / size
    dist.all_reduce(links)
    return {kind: Sent(*of_kind) for kind, of_kind in zip(KINDS, (links / 4).tolist(), strict=True)}


def job_on_four(strategy: str, **options: Any) -> Job:
    shards = {"NO_SHARD": 1, "FULL_SHARD": 4, "SHARD_GRAD_OP": 4}.get(strategy, 2)
    return replace(JOB, strategy=strategy, num_shards=shards, num_replicas=4 // shards, **options)


@pytest.mark.spec("COST-15")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@ranks(4)
def test_machine_links_carry_calculated_bytes(strategy: str) -> None:
    job = job_on_four(strategy, micro_batches=2)
    assert measured(job) == sent_by_link(job, PER_MACHINE)


@pytest.mark.spec("COST-15")
@ranks(4)
def test_smaller_mesh_all_gathers_within_machine_in_backward() -> None:
    job = job_on_four("FULL_SHARD", per_parameter=True, reshards_to=2)
    found = sent_by_link(job, PER_MACHINE)
    assert measured(job) == found
    # In a ring of both machines, half of the hops are between machines. All-gathers for backward stay within one.
    assert 0 < found["AG"].between < found["AG"].within
    assert found["RS"].between == found["RS"].within


@pytest.mark.spec("COST-15")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_bytes_within_and_between_machines_add_up_to_all_sent_bytes(strategy: str) -> None:
    job = replace(JOB, strategy=strategy, num_shards=4, num_replicas=3)
    sent = cost_of(job).sent
    for per_machine in (1, 3, 4, 12):
        links = sent_by_link(job, per_machine)
        assert {kind: one.within + one.between for kind, one in links.items()} == pytest.approx(sent)
        if per_machine == 1:
            assert {kind: one.within for kind, one in links.items()} == dict.fromkeys(sent, 0.0)
        if per_machine == 12:
            assert {kind: one.between for kind, one in links.items()} == dict.fromkeys(sent, 0.0)


@pytest.mark.spec("COST-15")
def test_sharding_within_machines_sends_nearly_as_much_in_total_and_less_between_machines() -> None:
    units = [[(1000, 1000)]] * 8
    full = Job(units=units, num_shards=64)
    hybrid = Job(units=units, strategy="HYBRID_SHARD", num_shards=8, num_replicas=8)
    assert sum(cost_of(hybrid).sent.values()) > 0.95 * sum(cost_of(full).sent.values())
    between = [sum(sent.between for sent in sent_by_link(job, 8).values()) for job in (full, hybrid)]
    model = 4 * 8_000_000
    # Three rings of all 64 ranks, with one hop in eight between machines; and the all-reduce of an eighth by 8 ranks.
    assert between == pytest.approx([3 * model * 63 / 64 / 8, 2 * model / 8 * 7 / 8])
    assert between[1] < 0.6 * between[0]


SLOW = Cluster(per_machine=2, operations=1e6, within=1e4, between=1e3)


@pytest.mark.spec("COST-18")
def test_step_takes_at_least_the_time_of_its_slowest_component_or_their_sum() -> None:
    # With 4000 bytes on 4 ranks, each rank sends 3000 in a collective: half between machines in 1.5 s, half within in
    # 0.15 s.
    job = Job(units=[[(1000,)]], num_shards=4)
    assert sent_by_link(job, 2)["RS"] == Sent(1500, 1500)
    time = step_time(job, 2e6, SLOW)
    # Two all-gathers and one reduce-scatter.
    assert (time.compute, time.communication) == pytest.approx((2.0, 4.5))
    assert (time.overlapped, time.apart) == pytest.approx((4.5, 6.5))
    busy = step_time(job, 9e6, SLOW)
    assert (busy.overlapped, busy.apart) == pytest.approx((9.0, 13.5))


@pytest.mark.spec("COST-18")
def test_different_links_overlap_and_one_ring_does_not() -> None:
    # A hybrid strategy sends 3 * 2000 bytes within a machine, and its all-reduce 2 * 2000 / 2 bytes between machines.
    job = Job(units=[[(1000,)]], strategy="HYBRID_SHARD", num_shards=2, num_replicas=2)
    time = step_time(job, 0.0, SLOW)
    assert time.communication == pytest.approx(0.6 + 2.0)
    assert time.overlapped == pytest.approx(2.0)
