"""Options of a sharded module in combination: freezing, float16, meshes with one column, nesting.

Each test was written for a defect of the package that no other test detected, and it has been seen to fail with that
defect. The docstring describes the defect.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import minifsdp
from minifsdp.checks import initial_weights
from spec_tests.construction.test_undocumented import Generates, tokens
from spec_tests.errors.faults import fail_in_forward
from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, seeded
from spec_tests.models.running import batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import all_connected, column_mesh, grid_mesh, sharded
from spec_tests.models.values import assert_same, full_gradients, full_values, mean_gradients
from spec_tests.subject import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method, trace

# --- replicas without sharding: a mesh of (n, 1) ---


@pytest.mark.spec("NEW-08")
@ranks(2)
def test_no_shard_all_reduce_may_be_delayed() -> None:
    """Defect: the all-reduce that replaces a reduce-scatter is issued regardless of the switch."""
    model = sharded(mesh=column_mesh())
    for steps in ((0, 1), (2, 3, 4), (5,)):
        for step in steps:
            is_last = step == steps[-1]
            model.set_requires_all_reduce(is_last)
            with trace.record() as recorder:
                iterate(model, step)
            assert (recorder.count("RS"), recorder.count("AR")) == (0, 5 * is_last)
            assert bool(full_gradients(model)) is is_last
        assert_same(full_gradients(model), mean_gradients(seeded(), steps))
        model.zero_grad()


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("columns", [1, 2])
@ranks(4)
def test_reset_iter_state_drops_the_partial_sum(columns: int) -> None:
    """Defect: `reset_iter_state` keeps the partial sum, and the next all-reduce includes it."""
    model = sharded(mesh=grid_mesh() if columns == 2 else column_mesh())
    model.set_requires_all_reduce(False)
    iterate(model, 7)
    fail_in_forward(model)
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    iterate(model)
    assert_same(full_gradients(model), mean_gradients(seeded()), bitwise=False)


# --- frozen parameters ---


@pytest.mark.spec("NEW-14")
@pytest.mark.parametrize("frozen", ["blocks.1.linear.weight", "blocks.1.linear", "enter.bias"])
@ranks(2)
def test_frozen_parameters_do_not_count_as_unused_and_get_no_weight_decay(frozen: str) -> None:
    """Defect: a parameter without a gradient counts as zeros even if it is frozen; the optimizer then decays it."""
    model = sharded()
    model.set_reduce_scatter_unused_params(True)
    chosen = [parameter for name, parameter in model.named_parameters() if name.startswith(frozen)]
    for parameter in chosen:
        parameter.requires_grad_(False)
    before = full_values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        iterate(model, step)
        assert all(parameter.grad is None for parameter in chosen)
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, value in full_values(model).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if not name.startswith(frozen)}


# --- the division, in float16 ---

LARGE = 40000.0
"""Two of these are more than float16 can hold (65504)."""


def large_gradient(model: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """The reduced gradient of a weight whose gradient is `LARGE` on each rank."""
    model(torch.full((1, 1), LARGE, dtype=dtype, device=device())).sum().backward()
    gradient: Tensor = model.weight.grad.full_tensor()
    return gradient


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("factor", [2.0, 4.0, 8.0])
@ranks(2)
def test_a_factor_is_split_around_a_sum_in_float16_which_would_overflow(factor: float) -> None:
    """Defect: the user's factor divides only after the sum, which is correct only for wider dtypes."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = fully_shard(nn.Linear(1, 2, bias=False, device=device()), mp_policy=policy)
    model.set_gradient_divide_factor(factor)
    found = large_gradient(model)
    assert torch.equal(found, torch.full_like(found, 2 * LARGE / factor))


@pytest.mark.spec("NEW-10")
@ranks(2)
def test_a_factor_that_was_given_before_the_model_became_float16_is_split_too() -> None:
    """Defect: the factor that was set for float32 is used unchanged."""
    model = fully_shard(nn.Linear(1, 2, bias=False, device=device()))
    model.set_gradient_divide_factor(4.0)
    found = large_gradient(model.half(), torch.float16)
    assert torch.equal(found, torch.full_like(found, LARGE / 2))


# --- settings of one group do not affect others ---


@pytest.mark.spec("NEW-09")
@ranks(2)
def test_hook_of_an_outer_group_is_not_called_for_inner_groups() -> None:
    """Defect: `set_all_reduce_hook` also sets the hook of inner modules."""
    model = sharded()
    model.set_all_reduce_hook(lambda reduced: reduced.zero_())
    iterate(model)
    expected = mean_gradients(seeded())
    for name, gradient in expected.items():
        if not name.startswith("blocks."):
            gradient.zero_()
    assert_same(full_gradients(model), expected)


@pytest.mark.spec("NEW-11")
@ranks(2)
def test_inner_group_may_unshard_in_backward_without_outer() -> None:
    """Defect: `set_unshard_in_backward` also changes inner modules."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4)))
    fully_shard(model[1])
    fully_shard(model, reshard_after_forward=True)
    model.set_unshard_in_backward(False)
    with trace.record() as recorder:
        loss_of(model(tokens(0, dist.get_rank()))).backward()
    assert of_unit(recorder, "", "AG", "RS") == ["AG", "RS"]
    assert of_unit(recorder, "1", "AG", "RS") == ["AG", "AG", "RS"]


# --- methods registered as forward methods ---


class Notes(Generates):
    """Records the arguments of its other method."""

    seen: tuple[torch.dtype, torch.dtype]

    def encode(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.seen = (x.dtype, scale.dtype)
        return self.enter(x) * scale


@pytest.mark.spec("NEW-13", "FS2-MP-04", "FS2-MP-06")
@ranks(2)
def test_a_registered_method_is_given_cast_inputs_and_its_output_is_cast() -> None:
    """Defect: the return value of the pre-forward hook or of the post-forward hook is dropped."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(seeded(Notes), mp_policy=policy)
    register_fsdp_forward_method(model, "encode")
    output = model.encode(batch(), scale=torch.ones(WIDTH, device=device()))
    assert model.seen == (torch.bfloat16, torch.bfloat16)
    assert output.dtype == torch.float64


# --- messages to the ranks ---


@pytest.mark.spec("NEW-19")
@ranks(4)
def test_order_error_in_a_sub_group_names_global_ranks() -> None:
    """Defect: the error names 0 and 1, the indices within the group of ranks 2 and 3."""
    model = sharded(mesh=grid_mesh())
    order = ((0, 1, 2, 3), (0, 2, 1, 3))[dist.get_rank() % 2]
    first = dist.get_rank() // 2 * 2
    with minifsdp.debug("order"), pytest.raises(RuntimeError, match=rf"rank {first}(.|\n)*rank {first + 1}"):
        iterate(model, order=order)


@pytest.mark.spec("NEW-20")
@pytest.mark.parametrize("replicas", [False, True])
@ranks(2)
def test_reordered_initial_weights_with_equal_sum_are_noticed(replicas: bool) -> None:
    """Defect: the checksum is a sum, which ignores positions; or only shards are compared, and replicas are not."""
    model = seeded()
    if dist.get_rank():
        with torch.no_grad():
            bias = model.blocks[2].linear.bias
            bias.copy_(bias.flip(0))
    mesh = column_mesh() if replicas else None
    with debugging(), pytest.warns(UserWarning, match=r"parameter 'linear\.bias' on rank\(s\) 1 differs"):
        fully_shard(model.blocks[2], mesh=mesh)


@pytest.mark.spec("NEW-20")
@ranks(2)
def test_tensor_parallel_weights_are_compared_per_shard() -> None:
    """Defect: the checksum is computed on a DTensor, which is refused, or on the unsharded tensor."""
    for shape, differs in (((2, 1), True), ((1, 2), False)):
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=("data", "tensor"))
        all_connected()
        model = parallelize_module(seeded(lambda: nn.Linear(2, 2)), mesh["tensor"], ColwiseParallel())
        with torch.no_grad():
            model.weight.to_local().mul_(1 + dist.get_rank())
        with debugging(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fully_shard(model, mesh=mesh["data"])
        assert ["parameter 'weight' on rank(s) 1 differs" in str(one.message) for one in caught] == [True] * differs


def debugging() -> Any:
    """Behaves like ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` while the context is open."""
    return mock.patch.object(initial_weights, "get_debug_level", return_value=dist.DebugLevel.DETAIL)
