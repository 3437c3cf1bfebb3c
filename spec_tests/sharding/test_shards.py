"""The arithmetic of shards, for any sizes and any number of ranks: of the flat layout, and of each parameter."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard

from minifsdp.checks.shardable import check_parameter
from minifsdp.engine.flat_tensor import FlatSharding, memory_orders
from minifsdp.engine.shards import padded_shard_numel, shard_of, shard_shape

# --- flat ---

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


# --- each parameter ---


class Split(NamedTuple):
    """The arguments that most functions in `shards` have."""

    shape: torch.Size
    dim: int
    num_shards: int


shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(torch.Size)
splits = st.builds(Split, shape=shapes, dim=st.just(0), num_shards=st.integers(1, 9))


@st.composite
def splits_along_any_dim(draw: st.DrawFn) -> Split:
    num_shards = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= num_shards
    return Split(torch.Size(shape), dim, num_shards)


@pytest.mark.pure
@pytest.mark.spec("FS2-05", "FS2-06", "FS2-08")
@given(st.one_of(splits, splits_along_any_dim()))
def test_the_shards_are_those_of_torch_chunk_and_the_last_ones_may_be_empty(split: Split) -> None:
    # Element i is i, so every element can be identified by its value.
    whole = torch.arange(split.shape.numel()).view(split.shape)
    expected = [*whole.chunk(split.num_shards, split.dim), *[whole[:0]] * split.num_shards]
    for index in range(split.num_shards):
        part = shard_of(whole, split.dim, split.num_shards, index)
        assert part.shape == shard_shape(*split, index)
        assert torch.equal(part.reshape(-1), expected[index].reshape(-1))


@pytest.mark.pure
@pytest.mark.spec("FS2-06")
@given(splits)
def test_every_rank_sends_equal_size_with_little_padding(split: Split) -> None:
    num_rows, per_row = shard_shape(*split, 0)[0], split.shape[1:].numel()
    padding = padded_shard_numel(*split) * split.num_shards - split.shape.numel()
    assert 0 <= padding <= (split.num_shards - 1) * max(per_row * num_rows, 1)
    for index in range(split.num_shards):
        assert shard_shape(*split, index).numel() <= padded_shard_numel(*split)


@pytest.mark.pure
@pytest.mark.spec("FS2-08")
def test_uneven_sharding_along_another_dim_is_refused_with_shape_and_number() -> None:
    module = nn.Linear(3, 4)
    with pytest.raises(NotImplementedError, match=r"dim 1: a parameter of shape \(4, 3\) cannot be divided into 2"):
        check_parameter(module.weight, "weight", Shard(1), 2)
