"""The tensor that autograd uses: it is resized but never replaced, and autograd does not record writes to it."""

from __future__ import annotations

import pytest
import torch

from minifsdp.engine import lifetime
from minifsdp.engine.flat_tensor import UnshardedTensor

CPU = torch.device("cpu")


@pytest.mark.pure
@pytest.mark.spec("SHARD-13")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unsharded_tensor_allocates_and_releases_memory_and_keeps_its_shape(dtype: torch.dtype) -> None:
    tensor = UnshardedTensor(4, dtype, CPU, None)
    storage = tensor.leaf.untyped_storage()
    assert tensor.num_bytes == 4 * dtype.itemsize
    tensor.allocate()
    view = tensor.leaf.detach()[1:3]
    lifetime.release(tensor.alias)
    for _ in range(2):
        assert storage.size() == 0
        tensor.allocate()
        assert storage.size() == tensor.num_bytes
        tensor.alias.fill_(3)
        assert view.tolist() == [3, 3], "a view of an earlier life sees the values of this one"
        lifetime.release(tensor.alias)
        assert (tensor.leaf.shape, view.shape) == ((4,), (2,))


@pytest.mark.pure
def test_write_through_the_alias_is_not_a_change_for_autograd() -> None:
    tensor = UnshardedTensor(4, torch.float32, CPU, None)
    tensor.allocate()
    tensor.alias.fill_(3)
    loss = (tensor.leaf * tensor.leaf).sum()
    lifetime.release(tensor.alias)
    tensor.allocate()
    tensor.alias.fill_(3)
    loss.backward()
    assert tensor.leaf.grad is not None
    assert tensor.leaf.grad.tolist() == [6, 6, 6, 6]


@pytest.mark.pure
def test_leaf_is_autograd_leaf_requiring_gradient() -> None:
    tensor = UnshardedTensor(2, torch.float32, CPU, None)
    assert tensor.leaf.is_leaf
    assert tensor.leaf.requires_grad


@pytest.mark.pure
def test_borrowed_tensor_uses_memory_of_lender() -> None:
    lender = torch.ones(4)
    tensor = UnshardedTensor(4, torch.float32, CPU, lender)
    assert tensor.is_borrowed
    assert tensor.leaf.data_ptr() == lender.data_ptr()
    lender.fill_(5)
    assert tensor.leaf.tolist() == [5, 5, 5, 5]


@pytest.mark.pure
@pytest.mark.spec("STREAM-05")
def test_unsharded_tensor_uses_the_new_memory_of_its_lender() -> None:
    lender = torch.ones(4)
    tensor = UnshardedTensor(4, torch.float32, CPU, lender)
    leaf = tensor.leaf
    tensor.use_memory_of(lender)
    assert tensor.leaf.data_ptr() == lender.data_ptr()
    elsewhere = torch.full((4,), 7.0)
    tensor.use_memory_of(elsewhere)
    assert tensor.leaf is leaf, "hooks lie on it"
    assert tensor.leaf.data_ptr() == elsewhere.data_ptr()
