"""The tensor that autograd uses: it is resized but never replaced, and autograd does not record writes to it."""

from __future__ import annotations

import pytest
import torch

from minifsdp.engine.flat_tensor import UnshardedTensor

CPU = torch.device("cpu")


@pytest.mark.pure
@pytest.mark.spec("SHARD-13")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_memory_comes_and_goes_and_its_shape_stays(dtype: torch.dtype) -> None:
    tensor = UnshardedTensor(4, dtype, CPU)
    storage = tensor.leaf.untyped_storage()
    assert tensor.num_bytes == 4 * dtype.itemsize
    tensor.allocate()
    view = tensor.leaf.detach()[1:3]
    tensor.release()
    for _ in range(2):
        assert storage.size() == 0
        tensor.allocate()
        assert storage.size() == tensor.num_bytes
        tensor.alias.fill_(3)
        assert view.tolist() == [3, 3], "a view of an earlier life sees the values of this one"
        assert tensor.release() is not None
        assert (tensor.leaf.shape, view.shape) == ((4,), (2,))


@pytest.mark.pure
def test_writing_through_the_alias_does_not_look_like_a_change_to_autograd() -> None:
    tensor = UnshardedTensor(4, torch.float32, CPU)
    tensor.allocate()
    tensor.alias.fill_(3)
    loss = (tensor.leaf * tensor.leaf).sum()
    tensor.release()
    tensor.allocate()
    tensor.alias.fill_(3)
    loss.backward()
    assert tensor.leaf.grad is not None
    assert tensor.leaf.grad.tolist() == [6, 6, 6, 6]


@pytest.mark.pure
def test_leaf_is_autograd_leaf_requiring_gradient() -> None:
    tensor = UnshardedTensor(2, torch.float32, CPU)
    assert tensor.leaf.is_leaf
    assert tensor.leaf.requires_grad


@pytest.mark.pure
def test_borrowed_tensor_uses_memory_of_lender() -> None:
    lender = torch.ones(4)
    tensor = UnshardedTensor(4, torch.float32, CPU, lender)
    assert tensor.is_borrowed
    assert tensor.leaf.data_ptr() == lender.data_ptr()
    assert tensor.release() is None
    lender.fill_(5)
    assert tensor.leaf.tolist() == [5, 5, 5, 5]


@pytest.mark.pure
@pytest.mark.spec("STREAM-05")
def test_it_follows_a_lender_that_was_given_other_memory() -> None:
    lender = torch.ones(4)
    tensor = UnshardedTensor(4, torch.float32, CPU, lender)
    leaf = tensor.leaf
    tensor.use_memory_of(lender)
    assert tensor.leaf.data_ptr() == lender.data_ptr()
    elsewhere = torch.full((4,), 7.0)
    tensor.use_memory_of(elsewhere)
    assert tensor.leaf is leaf, "hooks lie on it"
    assert tensor.leaf.data_ptr() == elsewhere.data_ptr()
