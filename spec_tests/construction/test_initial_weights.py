"""While torch's debug level is ``DETAIL``, `fully_shard` compares the initial weights of the ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models import sharding
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, detailed_debugging
from spec_tests.subject import fully_shard


@pytest.mark.spec("NEW-20")
@pytest.mark.parametrize("mesh", ["line_mesh", "column_mesh"])
@ranks(2)
def test_reordered_initial_weights_with_equal_sum_are_noticed(mesh: str) -> None:
    """Defect: the checksum is a sum, which ignores positions; or only shards are compared, and replicas are not."""
    layer = seeded(lambda: nn.Linear(6, 6))
    if dist.get_rank():
        layer.bias.data = layer.bias.data.flip(0)
    with detailed_debugging(), pytest.warns(UserWarning, match=r"parameter 'bias' on rank\(s\) 1 differs"):
        fully_shard(layer, mesh=getattr(sharding, mesh)())


@pytest.mark.spec("NEW-20")
@pytest.mark.parametrize(("shape", "num_warnings"), [((2, 1), 1), ((1, 2), 0)], ids=str)
@ranks(2)
def test_tensor_parallel_weights_are_compared_per_shard(shape: tuple[int, int], num_warnings: int) -> None:
    """Defect: the checksum is computed on a DTensor, which is refused, or on the unsharded tensor."""
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("data", "tensor"))
    sharding.all_connected()
    model = parallelize_module(seeded(lambda: nn.Linear(2, 2)), mesh["tensor"], ColwiseParallel())
    with torch.no_grad():
        model.weight.to_local().mul_(1 + dist.get_rank())
    with detailed_debugging(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(model, mesh=mesh["data"])
    assert ["'weight' on rank(s) 1 differs" in str(one.message) for one in caught] == [True] * num_warnings


@pytest.mark.spec("NEW-19")
@ranks(4)
def test_order_error_in_a_sub_group_names_global_ranks() -> None:
    """Defect: the error names 0 and 1, the indices within the group of ranks 2 and 3."""
    model = sharding.sharded(mesh=sharding.grid_mesh())
    order = ((0, 1, 2, 3), (0, 2, 1, 3))[dist.get_rank() % 2]
    first = dist.get_rank() // 2 * 2
    with minifsdp.debug("order"), pytest.raises(RuntimeError, match=rf"rank {first}(.|\n)*rank {first + 1}"):
        model(batch(), order=order).sum().backward()
