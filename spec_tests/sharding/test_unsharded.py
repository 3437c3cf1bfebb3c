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
        assert view.tolist() == [3, 3], "a view of the earlier memory shows the new values"
        lifetime.release(tensor.alias)
        assert (tensor.leaf.shape, view.shape) == ((4,), (2,))


@pytest.mark.pure
@pytest.mark.spec("STREAM-05")
def test_unsharded_tensor_uses_the_new_memory_of_its_lender() -> None:
    lender = torch.ones(4)
    tensor = UnshardedTensor(4, torch.float32, CPU, lender)
    leaf = tensor.leaf
    assert tensor.is_borrowed
    assert leaf.data_ptr() == lender.data_ptr()
    elsewhere = torch.full((4,), 7.0)
    tensor.use_memory_of(elsewhere)
    assert tensor.leaf is leaf, "it has the hooks"
    assert tensor.leaf.data_ptr() == elsewhere.data_ptr()
