"""Communication before a state dict is saved or loaded, along the rows and columns of the mesh."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minifsdp.checks import agreement
from minifsdp.checks.collective_log import log
from minifsdp.engine.exchange import exchange, groups_of
from minifsdp.engine.mesh import Group, MeshGroups
from spec_tests.checkpoint.checkpoints import flat_or_original, make, train, trained, wrapped
from spec_tests.harness import device, rank_among_fake_ranks, ranks
from spec_tests.models.sharding import grid
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy


@pytest.mark.spec("SD-FULL-03", "SD-FULL-09", "HYB-10")
@ranks(4)
def test_a_refusal_goes_through_shard_then_replicate_group_to_all_ranks() -> None:
    mesh, rank = MeshGroups.hybrid(*map(Group.of, grid())), dist.get_rank()
    groups = groups_of([mesh, mesh])
    assert groups == [mesh.shard, mesh.replicate], "each group once"
    assert exchange(groups, rank * 10) == {0: 0, 1: 10, 2: 20, 3: 30}
    agreement.refuse_together(groups, [])
    with pytest.raises(agreement.StateDictMismatchError, match="refused on every rank") as caught:
        agreement.refuse_together(groups, ["a key", *(["my own"] if rank == 3 else [])])
    # Equal problems are listed once.
    assert "rank 0, rank 1, rank 2, rank 3: a key\nrank 3: my own\n" in str(caught.value)
    with pytest.raises(RuntimeError, match=r"key 9\nand 15 more\n.*explain-error E-state-dict-refused"):
        agreement.refuse_together(groups, [f"key {number}" for number in range(25)] if rank == 2 else [])
    with pytest.raises(ValueError, match=rf"rank {rank}: the state dict is refused, and nothing"):
        agreement.refuse_together([], ["nobody was asked"])


@pytest.mark.spec("SD-FULL-09", "OSD-LOAD-01", "HYB-10")
@flat_or_original
@ranks(4)
def test_all_replicas_of_a_hybrid_refuse_an_invalid_dict(keep: bool) -> None:
    options = {"use_orig_params": keep, "sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": grid()}
    model, optimizer = trained(steps=1, **options)
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 3:
        del weights["scale"], states["state"]["head.weight"]
    with pytest.raises(RuntimeError, match=r'rank 3: Missing key\(s\) in state_dict: "scale"'):
        model.load_state_dict(weights)
    with pytest.raises(RuntimeError, match=r"rank 3: key 'head\.weight': expected states"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)
    given = optimizer.state_dict()
    if dist.get_rank() == 3:
        given["state"][min(given["state"])]["step"] += 1
    with pytest.raises(RuntimeError, match=r"optimizer state 'step' of .*: expected 1\.0 .*found 2\.0 .* on rank 3"):
        FSDP.optim_state_dict(model, optimizer, given)
    dist.barrier()


@pytest.mark.spec("SD-FULL-03")
@ranks(3)
def test_refused_call_does_not_count_as_an_arrival_at_a_later_barrier() -> None:
    group = dist.new_group([0, 1, 2])
    groups = [Group.of(group)]
    group.set_timeout(timedelta(seconds=0.2))
    dist.barrier()
    for present, missing in (([0], 1), ([0, 2], 1), ([0], 1), ([1], 0)):
        if dist.get_rank() in present:
            # On a slow machine, one present rank may be refused before the other one arrives.
            with pytest.raises(RuntimeError, match=rf"rank\(s\) \[.*\b{missing}\b.*\] did not call it"):
                agreement.monitored_barrier(groups, "state_dict()")
        dist.barrier()
    group.set_timeout(timedelta(minutes=1))
    dist.barrier()
    assert agreement.monitored_barrier(groups, "state_dict()") == []


@pytest.mark.spec("SD-FULL-03")
@ranks(2)
def test_keys_of_earlier_calls_are_deleted_from_the_store() -> None:
    groups = [Group.of(dist.new_group([0, 1]))]
    store, nums_of_keys = groups[0].process_group.get_group_store(), []
    for _ in range(3):
        assert agreement.monitored_barrier(groups, "state_dict()", has_facts=True) == groups
        dist.barrier()
        nums_of_keys.append(sum("state_dict()" in key for key in store.list_keys()))
        dist.barrier()
    assert nums_of_keys[1] == nums_of_keys[2]


@pytest.mark.spec("ORDER-11")
@flat_or_original
@ranks(2)
def test_state_dict_call_on_one_rank_does_not_affect_the_next_steps(keep: bool) -> None:
    group = dist.new_group([0, 1])
    model = wrapped(make(), use_orig_params=keep, process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, [0])
    dist.barrier()
    if dist.get_rank() == 0:
        group.set_timeout(timedelta(seconds=0.2))
        entries = log.sequence_of(Group.of(group)).entries
        num_before = len(entries)
        with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] did not call it"):
            model.state_dict()
        assert log.waiting is None
        assert len(entries) == num_before
        group.set_timeout(timedelta(minutes=1))
    dist.barrier()
    train(model, optimizer, [1])
    model.state_dict()
    train(model, optimizer, [2])


@pytest.mark.spec("SD-FULL-08")
@rank_among_fake_ranks(4)
def test_one_process_that_acts_as_rank_0_of_four_saves_and_loads() -> None:
    """Its all-gathered values are meaningless."""
    model = FSDP(torch.nn.Linear(4, 4), device_id=device())
    assert list(model.state_dict()) == ["weight", "bias"]
    model.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    assert next(model.parameters()).tolist() == [1.0] * 5
