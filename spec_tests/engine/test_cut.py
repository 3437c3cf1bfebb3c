"""The arithmetic of the per-parameter layout, for any shape and any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.engine.cut import Cut

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(torch.Size)
cuts = st.builds(Cut, shape=shapes, dim=st.just(0), num_shards=st.integers(1, 9))


@st.composite
def cuts_along_any_dim(draw: st.DrawFn) -> Cut:
    num_shards = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= num_shards
    return Cut(torch.Size(shape), dim, num_shards)


def whole_of(cut: Cut) -> torch.Tensor:
    """Element i is i, so every element can be identified by its value."""
    return torch.arange(cut.shape.numel()).view(cut.shape)


@pytest.mark.pure
@pytest.mark.spec("FS2-05", "FS2-06")
@given(cuts)
def test_the_pieces_are_those_of_torch_chunk_and_the_last_ones_may_be_empty(cut: Cut) -> None:
    whole = whole_of(cut)
    expected = [*whole.chunk(cut.num_shards), *[whole[:0]] * cut.num_shards][: cut.num_shards]
    for index in range(cut.num_shards):
        part = cut.local_part(whole, index)
        assert part.shape == cut.local_shape(index)
        assert torch.equal(part.reshape(-1), expected[index].reshape(-1))


@pytest.mark.pure
@pytest.mark.spec("FS2-05", "FS2-08")
@given(cuts_along_any_dim())
def test_the_pieces_side_by_side_are_the_whole(cut: Cut) -> None:
    whole = whole_of(cut)
    parts = [cut.local_part(whole, index) for index in range(cut.num_shards)]
    assert torch.equal(torch.cat(parts, dim=cut.dim), whole)


@pytest.mark.pure
@pytest.mark.spec("FS2-06")
@given(cuts)
def test_every_rank_sends_the_same_and_no_more_than_one_row_too_many(cut: Cut) -> None:
    per_row = cut.shape[1:].numel()
    assert cut.padded_numel == cut.chunk_numel * cut.num_shards
    assert 0 <= cut.padded_numel - cut.shape.numel() <= (cut.num_shards - 1) * max(per_row * cut.num_rows, 1)
    for index in range(cut.num_shards):
        assert cut.local_shape(index).numel() <= cut.chunk_numel


@pytest.mark.pure
@pytest.mark.spec("FS2-08")
def test_an_uneven_cut_along_another_dim_is_refused_with_shape_and_number() -> None:
    with pytest.raises(NotImplementedError, match=r"dim 1: a parameter of shape \(4, 3\) cannot be divided into 2"):
        Cut(torch.Size([4, 3]), 1, 2)
