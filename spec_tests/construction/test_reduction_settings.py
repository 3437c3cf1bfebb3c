"""Methods of `FSDPModule` that change the reduction of gradients: all-reduce, hooks, factors, unused parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests.errors.faults import fail_in_forward
from spec_tests.harness import device, ranks
from spec_tests.models import MODELS
from spec_tests.models.modules import Stack, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import column_mesh, grid_mesh, line_mesh, sharded
from spec_tests.models.values import assert_same, full_gradients, full_values, mean_gradients
from spec_tests.oracles import Recipe, assert_same_training, tolerance_for, train_fsdp2, train_single
from spec_tests.subject import MixedPrecisionPolicy, fully_shard, trace

# --- when gradients are reduced ---


@pytest.mark.spec("NEW-08")
@ranks(2)
def test_the_all_reduce_of_replicas_without_sharding_may_be_delayed() -> None:
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


@pytest.mark.spec("FS2-SYNC-01", "NEW-08")
@pytest.mark.parametrize("mesh", [grid_mesh, column_mesh])
@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@ranks(4)
def test_units_inside_are_reduced_over_all_ranks_if_the_root_alone_is_not(
    mesh: Callable[[], Any], setting: str
) -> None:
    """Defect: the setting for the gradients of one unit stops the all-reduce of the units inside it."""
    model = sharded(mesh=mesh())
    getattr(model, setting)(False, recurse=False)
    iterate(model)
    expected = {name: value for name, value in mean_gradients(seeded()).items() if name.startswith("blocks.")}
    assert_same(full_gradients(model), expected, bitwise=False)
    getattr(model, setting)(True, recurse=False)
    iterate(model, 1)
    assert_same(full_gradients(model), mean_gradients(seeded(), (0, 1)), bitwise=False)


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("mesh", [grid_mesh, column_mesh])
@ranks(4)
def test_reset_iter_state_drops_the_partial_sum(mesh: Callable[[], Any]) -> None:
    """Defect: `reset_iter_state` keeps the partial sum, and the next all-reduce includes it."""
    model = sharded(mesh=mesh())
    model.set_requires_all_reduce(False)
    iterate(model, 7)
    fail_in_forward(model)
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    iterate(model)
    assert_same(full_gradients(model), mean_gradients(seeded()), bitwise=False)


# --- hooks ---


@pytest.mark.spec("NEW-09")
@pytest.mark.parametrize("mesh", [grid_mesh, line_mesh])
@ranks(4)
def test_all_reduce_hook_gets_the_mean_gradient_of_each_group(mesh: Callable[[], Any]) -> None:
    def build() -> Stack:
        return seeded(lambda: Stack(8, hidden=(4, 8, 12, 16)))

    model, seen = sharded(build(), mesh=mesh()), []
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda reduced, module=module: seen.append((module, reduced.clone())))
    loss_of(model(batch(width=8))).backward()
    assert [module for module, _ in seen] == [*reversed(model.blocks), model]
    for module, reduced in seen[:-1]:
        # The number of rows is divisible by the number of ranks, so there is no padding.
        mine = [parameter.grad.to_local().reshape(-1) for parameter in module.parameters()]
        assert torch.equal(reduced.reshape(-1), torch.cat(mine))
    assert_same(full_gradients(model), mean_gradients(build(), width=8))


@pytest.mark.spec("NEW-09")
@ranks(4)
def test_an_unknown_stream_for_the_hook_is_refused() -> None:
    with pytest.raises(ValueError, match="stream"):
        sharded(mesh=grid_mesh()).set_all_reduce_hook(print, stream=object())


@pytest.mark.spec("NEW-09")
@pytest.mark.parametrize("hooked", ["blocks.1.", ""])
@ranks(2)
def test_all_reduce_hook_changes_the_gradients_of_its_own_group_only(hooked: str) -> None:
    """Defect: `set_all_reduce_hook` also sets the hook of inner modules."""
    model = sharded()
    (model.blocks[1] if hooked else model).set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    iterate(model)
    expected = mean_gradients(seeded())
    for name, gradient in expected.items():
        if name.startswith(hooked) if hooked else not name.startswith("blocks."):
            gradient.mul_(2)
    assert_same(full_gradients(model), expected)


# --- factors ---


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("mesh", [grid_mesh, line_mesh])
@pytest.mark.parametrize("sums_only", [False, True])
@ranks(4)
def test_a_factor_replaces_the_division_by_the_number_of_ranks(sums_only: bool, mesh: Callable[[], Any]) -> None:
    model = sharded(mesh=mesh())
    model.set_gradient_divide_factor(1.0)
    model.blocks[1].set_gradient_divide_factor(8.0)
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(sums_only)
    iterate(model)
    expected = mean_gradients(seeded())
    for name, gradient in expected.items():
        if name.startswith("blocks.1."):
            gradient.mul_(4 / 8)
        elif not name.startswith("blocks."):
            gradient.mul_(4 / 1)
    assert_same(full_gradients(model), expected)


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2,)], ids=str)
@ranks(2)
def test_a_factor_replaces_the_number_of_ranks_on_a_mesh_of_any_shape(sizes: tuple[int, ...]) -> None:
    model = fully_shard(seeded(), mesh=init_device_mesh(device().type, sizes))
    model.set_gradient_divide_factor(8.0)
    iterate(model)
    # The sum of two ranks divided by 8, instead of by 2.
    assert_same(full_gradients(model), {name: gradient / 4 for name, gradient in mean_gradients(seeded()).items()})


@pytest.mark.spec("NEW-10")
@ranks(2)
def test_the_older_name_of_the_factor_warns_and_works() -> None:
    model = fully_shard(seeded())
    # The class of torch's warning.
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(1.0)
    iterate(model)
    assert_same(full_gradients(model), {name: gradient * 2 for name, gradient in mean_gradients(seeded()).items()})


LARGE = 40000.0
"""Two of these are more than float16 can hold (65504)."""


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("becomes_half", [False, True])
@pytest.mark.parametrize("factor", [2.0, 4.0, 8.0])
@ranks(2)
def test_a_factor_is_split_around_a_sum_in_float16_which_would_overflow(factor: float, becomes_half: bool) -> None:
    """Defect: the user's factor divides only after the sum, or as in the dtype of before a conversion to float16."""
    policy = MixedPrecisionPolicy() if becomes_half else MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = fully_shard(nn.Linear(1, 2, bias=False, device=device()), mp_policy=policy)
    model.set_gradient_divide_factor(factor)
    if becomes_half:
        model.half()
    x = torch.full((1, 1), LARGE, dtype=model.weight.dtype, device=device())
    model(x).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2 * LARGE / factor]] * 2


# --- unused and frozen parameters ---


def reducing_unused(module: nn.Module) -> Any:
    model = fully_shard(module)
    model.set_reduce_scatter_unused_params(True)
    return model


@pytest.mark.spec("NEW-14", "PAR-06")
@pytest.mark.parametrize(("accumulate", "no_sync"), [(1, False), (2, False), (2, True)])
@ranks(2)
def test_ranks_that_take_different_branches_train_like_one_process(accumulate: int, no_sync: bool) -> None:
    info, recipe = MODELS["one_sided"], Recipe(steps=3, accumulate=accumulate, no_sync=no_sync)
    ours = train_fsdp2(reducing_unused, info, recipe)
    assert_same_training(ours, train_single(info, 2, recipe), tolerance_for(2))


@pytest.mark.spec("NEW-14")
@ranks(2)
def test_reduce_scatter_of_unused_params_can_be_set_for_one_module() -> None:
    model = seeded()
    for block in model.blocks:
        block.unused = nn.Linear(2, 2).to(device())
    sharded(model)
    model.set_reduce_scatter_unused_params(True)
    model.blocks[0].set_reduce_scatter_unused_params(False, recurse=False)
    iterate(model)
    assert [block.unused.weight.grad is not None for block in model.blocks] == [False, True, True, True]
    assert torch.equal(model.blocks[1].unused.weight.grad.full_tensor(), torch.zeros(2, 2, device=device()))


@pytest.mark.spec("NEW-14")
@pytest.mark.parametrize("frozen", ["blocks.1.linear.weight", "blocks.1.linear", "enter.bias"])
@ranks(2)
def test_frozen_parameters_do_not_count_as_unused_and_get_no_weight_decay(frozen: str) -> None:
    """Defect: a parameter without a gradient counts as zeros even if it is frozen; the optimizer then decays it."""
    model = sharded()
    model.set_reduce_scatter_unused_params(True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    before = full_values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        iterate(model, step, optimizer)
    moved = {name for name, value in full_values(model).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if not name.startswith(frozen)}
