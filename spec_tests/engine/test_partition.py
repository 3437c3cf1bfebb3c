"""The arithmetic of the flat layout, for any sizes and any number of shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.engine.partition import Partition

partitions = st.builds(
    Partition,
    numels=st.lists(st.integers(0, 40), min_size=1, max_size=8).map(tuple),
    num_shards=st.integers(1, 17),
)


def row_of(partition: Partition) -> torch.Tensor:
    """Element i is i + 1 and padding is 0, so every element can be identified by its value."""
    row = torch.zeros(partition.padded_numel, dtype=torch.long)
    row[: partition.numel] = torch.arange(1, partition.numel + 1)
    return row


def shapes_of(partition: Partition) -> list[torch.Size]:
    return [torch.Size([numel]) for numel in partition.numels]


@pytest.mark.pure
@pytest.mark.spec("SHARD-02")
@given(partitions)
def test_pieces_have_equal_size_and_cover_the_padded_row_exactly_once(partition: Partition) -> None:
    row = row_of(partition)
    local_shards = [row[partition.local_shard(index)] for index in range(partition.num_shards)]
    assert {local_shard.numel() for local_shard in local_shards} == {partition.shard_numel}
    assert torch.equal(torch.cat(local_shards), row)


@pytest.mark.pure
@pytest.mark.spec("SHARD-02", "SHARD-03")
@given(partitions)
def test_a_piece_is_no_larger_than_it_must_be(partition: Partition) -> None:
    padding = partition.padded_numel - partition.numel
    assert 0 <= padding < partition.num_shards


@pytest.mark.pure
@pytest.mark.spec("SHARD-03")
@given(partitions)
def test_the_slices_of_all_pieces_rebuild_every_parameter_exactly(partition: Partition) -> None:
    row = row_of(partition)
    parameters = partition.views(row, shapes_of(partition))
    rebuilt: list[list[torch.Tensor]] = [[] for _ in partition.numels]
    for index in range(partition.num_shards):
        local_shard = row[partition.local_shard(index)]
        for parts, part in zip(rebuilt, partition.slices_of_local_shard(index), strict=True):
            assert 0 <= part.start <= part.stop <= partition.shard_numel
            parts.append(local_shard[part])
    for parameter, parts in zip(parameters, rebuilt, strict=True):
        assert torch.equal(torch.cat(parts), parameter)


@pytest.mark.pure
@pytest.mark.spec("SHARD-03")
@given(partitions)
def test_padding_is_never_inside_a_parameter(partition: Partition) -> None:
    row = row_of(partition)
    for parameter in partition.views(row, shapes_of(partition)):
        assert (parameter > 0).all()
    for index in range(partition.num_shards):
        local_shard = row[partition.local_shard(index)]
        for part in partition.slices_of_local_shard(index):
            assert (local_shard[part] > 0).all()
    in_slices = sum(
        part.stop - part.start for i in range(partition.num_shards) for part in partition.slices_of_local_shard(i)
    )
    assert in_slices == partition.numel


@pytest.mark.pure
@given(partitions)
def test_views_are_views_and_have_the_given_shapes(partition: Partition) -> None:
    row = row_of(partition)
    shapes = [torch.Size([1, numel, 1]) for numel in partition.numels]
    views = partition.views(row, shapes)
    assert [view.shape for view in views] == shapes
    for view in views:
        assert view.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()


@pytest.mark.pure
@pytest.mark.spec("SHARD-03")
@given(partitions, st.data())
def test_the_gradient_of_the_row_is_zero_in_padding_and_in_unused_parameters(
    partition: Partition, data: st.DataObject
) -> None:
    used = data.draw(st.sets(st.integers(0, len(partition.numels) - 1), min_size=1))
    row = torch.zeros(partition.padded_numel, requires_grad=True)
    views = partition.views(row, shapes_of(partition))
    torch.stack([views[index].sum() for index in used]).sum().backward()
    expected = torch.zeros_like(row)
    for index, view in enumerate(partition.views(expected, shapes_of(partition))):
        view.fill_(1.0 if index in used else 0.0)
    assert row.grad is not None
    assert torch.equal(row.grad, expected)


@pytest.mark.pure
def test_the_example_of_the_essay_holds() -> None:
    partition = Partition((3, 4), 2)
    assert (partition.numel, partition.shard_numel, partition.padded_numel) == (7, 4, 8)
    assert partition.split_sizes == [3, 4, 1]
    assert partition.slices_of_local_shard(0) == [slice(0, 3), slice(3, 4)]
    assert [s.stop - s.start for s in partition.slices_of_local_shard(1)] == [0, 3]


@pytest.mark.pure
@pytest.mark.spec("SHARD-02")
def test_a_row_cannot_be_cut_into_no_pieces() -> None:
    with pytest.raises(ValueError, match="0 shards"):
        Partition((3,), 0)
