"""Shard groups and replicate groups: the rows and columns of the table of ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp.cases import node_groups as nodes
from minifsdp.cases.node_groups import node_groups, node_size
from minifsdp.checks import forward_checks
from minifsdp.engine.mesh import Group, MeshGroups
from spec_tests.harness import ranks

CPU = torch.device("cpu")


def group(*members: int, rank: int = 0) -> Group:
    anything: Any = None
    return Group(anything, len(members), rank, members)


# --- the table ---


@pytest.mark.spec("MYTH-28")
@ranks(4)
def test_only_the_hybrid_mesh_covers_all_ranks() -> None:
    rank = dist.get_rank()
    row, column = group(rank // 2 * 2, rank // 2 * 2 + 1), group(rank % 2, rank % 2 + 2)
    assert forward_checks._covers(MeshGroups.hybrid(row, column), range(4))
    assert not forward_checks._covers(MeshGroups.sharded(row), range(4))


@pytest.mark.pure
@pytest.mark.spec("CTOR-14")
def test_group_of_one_rank_becomes_none() -> None:
    assert MeshGroups.sharded(group(5)) == MeshGroups(None, None)
    assert MeshGroups.replicated(group(5)) == MeshGroups(None, None)
    assert MeshGroups.hybrid(group(5), group(5, 7)) == MeshGroups(None, group(5, 7))
    assert MeshGroups.hybrid(group(5, 6), group(5)) == MeshGroups(group(5, 6), None)


# --- groups ---


@ranks(4)
def test_group_without_this_rank_raises_with_the_rank() -> None:
    front = dist.new_group([0, 1])
    # Wait until all ranks have created the group, before any rank finishes and its groups are destroyed.
    dist.barrier()
    if dist.get_rank() < 2:
        assert Group.of(front).ranks == (0, 1)
        return
    # For a rank that is not a member, torch.distributed returns an object that is not a group.
    with pytest.raises(ValueError, match=f"rank {dist.get_rank()}: this rank is not a member"):
        Group.of(front)


@ranks(2)
def test_a_group_that_torch_did_not_make_counts_its_ranks_from_0() -> None:
    class Simulated:
        def rank(self) -> int:
            return 2

        def size(self) -> int:
            return 3

    simulated: Any = Simulated()
    seen = Group.of(simulated)
    assert (seen.size, seen.rank, seen.ranks) == (3, 2, (0, 1, 2))


def in_nodes_of(num_ranks: int) -> None:
    # The value that torchrun sets on such nodes. The pool destroys groups between tests, so clear the cached ones.
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    nodes._node_groups.clear()


@pytest.mark.spec("HYB-03")
@ranks(4)
def test_node_groups_are_made_once_for_each_node_size() -> None:
    in_nodes_of(2)
    num_before = len(dist.distributed_c10d._world.pg_map)
    row, column = node_groups(CPU)
    assert len(dist.distributed_c10d._world.pg_map) == num_before + 2, "this rank is in one row and in one column"
    assert node_groups(CPU) == (row, column)
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    whole, alone = node_groups(CPU)
    assert Group.of(whole).ranks == (0, 1, 2, 3)
    assert Group.of(alone).size == 1
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    num_before = len(dist.distributed_c10d._world.pg_map)
    assert node_groups(CPU) == (row, column)
    assert len(dist.distributed_c10d._world.pg_map) == num_before
    dist.barrier()


@pytest.mark.spec("HYB-03")
@ranks(4)
def test_four_ranks_cannot_be_laid_out_in_nodes_of_three() -> None:
    in_nodes_of(3)
    with pytest.raises(ValueError, match=f"rank {dist.get_rank()}: 4 ranks .* nodes of 3") as caught:
        node_groups(CPU)
    assert "process_group=(sharding group, replication group)" in str(caught.value)


@pytest.mark.spec("HYB-03")
@ranks(2)
def test_without_local_world_size_all_ranks_are_on_one_node() -> None:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    assert node_size(CPU) == 2


@pytest.mark.spec("HYB-03")
@pytest.mark.pure
@pytest.mark.parametrize(("num_visible", "num_ranks"), [(1, 8), (8, 4)], ids=["each sees its own", "fewer ranks"])
def test_a_node_has_the_ranks_of_the_launcher(
    num_visible: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(device_count=lambda: num_visible)
    monkeypatch.setattr(torch, "get_device_module", lambda _: machine)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    assert node_size(torch.device("cuda")) == num_ranks
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert node_size(torch.device("cuda")) == num_visible
