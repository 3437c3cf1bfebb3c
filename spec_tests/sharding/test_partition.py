"""The arithmetic of the flat layout, for any sizes and any number of shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.engine.flat_tensor import FlatSharding, memory_orders

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
@pytest.mark.spec("SHARD-02", "SHARD-03")
@given(shardings)
def test_shards_have_equal_size_and_cover_padded_bucket(sharding: FlatSharding) -> None:
    row = row_of(sharding)
    local_shards = [row[sharding.shard_range(index)] for index in range(sharding.num_shards)]
    assert {local_shard.numel() for local_shard in local_shards} == {sharding.shard_numel}
    assert torch.equal(torch.cat(local_shards), row)
    assert 0 <= sharding.padded_numel - sharding.numel < sharding.num_shards, "the padding is minimal"


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
        assert (parameter > 0).all(), "padding is never inside a parameter"
        assert parameter.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()


@pytest.mark.pure
@pytest.mark.spec("FWD-04")
@given(st.lists(st.integers(1, 3), max_size=5), st.data())
def test_views_have_the_strides_of_the_parameters(sizes: list[int], data: st.DataObject) -> None:
    value = torch.randn(sizes).permute(data.draw(st.permutations(range(len(sizes)))))
    orders = memory_orders([value, torch.empty(2)])
    assert (0 not in orders) == (value.stride() == torch.empty(value.shape).stride())
    alone, padded = FlatSharding((value.numel(),), 1, orders), FlatSharding((value.numel(), 2), 3, orders)
    for sharding in (alone, padded):
        flat = torch.zeros(sharding.padded_numel)
        flat[: value.numel()] = sharding.flattened(0, value)
        view, *_ = sharding.views(flat, [value.shape, torch.Size([2])])
        assert torch.equal(view, value)
        assert view.stride() == value.stride()
    assert torch.equal(alone.make_shard([value], 0), alone.flattened(0, value))
