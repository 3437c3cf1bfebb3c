"""The arithmetic of the flat layout, for any sizes and any number of shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.engine.flat_tensor import FlatSharding

shardings = st.builds(
    FlatSharding,
    numels=st.lists(st.integers(0, 40), min_size=1, max_size=8).map(tuple),
    num_shards=st.integers(1, 17),
)


def row_of(sharding: FlatSharding) -> torch.Tensor:
    """Element i is i + 1 and padding is 0, so every element can be identified by its value."""
    row = torch.zeros(sharding.padded_numel, dtype=torch.long)
    row[: sharding.numel] = torch.arange(1, sharding.numel + 1)
    return row


def shapes_of(sharding: FlatSharding) -> list[torch.Size]:
    return [torch.Size([numel]) for numel in sharding.numels]


@pytest.mark.pure
@pytest.mark.spec("SHARD-02")
@given(shardings)
def test_shards_have_equal_size_and_cover_padded_bucket(sharding: FlatSharding) -> None:
    row = row_of(sharding)
    local_shards = [row[sharding.shard_range(index)] for index in range(sharding.num_shards)]
    assert {local_shard.numel() for local_shard in local_shards} == {sharding.shard_numel}
    assert torch.equal(torch.cat(local_shards), row)


@pytest.mark.pure
@pytest.mark.spec("SHARD-02", "SHARD-03")
@given(shardings)
def test_local_shard_has_minimal_size(sharding: FlatSharding) -> None:
    padding = sharding.padded_numel - sharding.numel
    assert 0 <= padding < sharding.num_shards


@pytest.mark.pure
@pytest.mark.spec("SHARD-03")
@given(shardings)
def test_slices_of_all_shards_rebuild_every_param(sharding: FlatSharding) -> None:
    row = row_of(sharding)
    parameters = sharding.views(row, shapes_of(sharding))
    rebuilt: list[list[torch.Tensor]] = [[] for _ in sharding.numels]
    for index in range(sharding.num_shards):
        local_shard = row[sharding.shard_range(index)]
        for parts, part in zip(rebuilt, sharding.param_ranges(index), strict=True):
            assert 0 <= part.start <= part.stop <= sharding.shard_numel
            parts.append(local_shard[part])
    for parameter, parts in zip(parameters, rebuilt, strict=True):
        assert torch.equal(torch.cat(parts), parameter)


@pytest.mark.pure
@pytest.mark.spec("SHARD-03")
@given(shardings)
def test_padding_is_never_inside_a_parameter(sharding: FlatSharding) -> None:
    row = row_of(sharding)
    for parameter in sharding.views(row, shapes_of(sharding)):
        assert (parameter > 0).all()
    for index in range(sharding.num_shards):
        local_shard = row[sharding.shard_range(index)]
        for part in sharding.param_ranges(index):
            assert (local_shard[part] > 0).all()
    in_slices = sum(part.stop - part.start for i in range(sharding.num_shards) for part in sharding.param_ranges(i))
    assert in_slices == sharding.numel


@pytest.mark.pure
@given(shardings)
def test_views_share_memory_and_have_the_given_shapes(sharding: FlatSharding) -> None:
    row = row_of(sharding)
    shapes = [torch.Size([1, numel, 1]) for numel in sharding.numels]
    views = sharding.views(row, shapes)
    assert [view.shape for view in views] == shapes
    for view in views:
        assert view.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()


@pytest.mark.pure
@pytest.mark.spec("SHARD-03")
@given(shardings, st.data())
def test_bucket_gradient_is_zero_for_padding_and_unused_params(sharding: FlatSharding, data: st.DataObject) -> None:
    used = data.draw(st.sets(st.integers(0, len(sharding.numels) - 1), min_size=1))
    row = torch.zeros(sharding.padded_numel, requires_grad=True)
    views = sharding.views(row, shapes_of(sharding))
    torch.stack([views[index].sum() for index in used]).sum().backward()
    expected = torch.zeros_like(row)
    for index, view in enumerate(sharding.views(expected, shapes_of(sharding))):
        view.fill_(1.0 if index in used else 0.0)
    assert row.grad is not None
    assert torch.equal(row.grad, expected)


@pytest.mark.pure
def test_documented_example_is_correct() -> None:
    sharding = FlatSharding((3, 4), 2)
    assert (sharding.numel, sharding.shard_numel, sharding.padded_numel) == (7, 4, 8)
    assert sharding.split_sizes == [3, 4, 1]
    assert sharding.param_ranges(0) == [slice(0, 3), slice(3, 4)]
    assert [s.stop - s.start for s in sharding.param_ranges(1)] == [0, 3]


@pytest.mark.pure
@pytest.mark.spec("SHARD-02")
def test_zero_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="0 shards"):
        FlatSharding((3,), 0)
