"""``reshard_after_forward=2``: between forward and backward, the modules have shards of a smaller mesh."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.sharding import sharded
from spec_tests.models.values import assert_same, full_gradients, mean_gradients
from spec_tests.subject import fully_shard


@pytest.mark.spec("FRESH-01", "NEW-05")
@ranks(4)
def test_after_an_evaluation_before_a_backward_modules_have_the_parameters_of_the_full_mesh() -> None:
    model = sharded(reshard_after_forward=2)
    parameters = list(model.parameters())
    loss = model(batch()).sum()
    with torch.no_grad():
        model(batch())
    assert all(map(operator.is_, model.parameters(), parameters))
    loss.backward()


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_a_parameter_of_tensor_parallelism_stays_registered_on_a_smaller_mesh() -> None:
    mesh = init_device_mesh(device().type, (4, 1), mesh_dim_names=("data", "tensor"))
    plain, model = (seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))) for _ in range(2))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"], reshard_after_forward=2)
    registered = model[0].weight
    loss = loss_of(model(batch()))
    assert model[0].weight is registered
    loss.backward()
    assert_same(full_gradients(model), mean_gradients(plain, [0]), bitwise=False)
