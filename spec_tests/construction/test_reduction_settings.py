"""Methods of `FSDPModule` that change the reduction of gradients: all-reduce, hooks, factors, unused parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests.harness import device, ranks
from spec_tests.models import sharding, values
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate
from spec_tests.subject import MixedPrecisionPolicy, fully_shard, trace

with_replicas = pytest.mark.parametrize("mesh", ["grid_mesh", "column_mesh"])

# --- when gradients are reduced ---


@pytest.mark.spec("NEW-08")
@ranks(2)
def test_the_all_reduce_of_replicas_without_sharding_may_be_delayed() -> None:
    """Defect: the all-reduce that replaces a reduce-scatter is issued regardless of the switch."""
    model = sharding.sharded(mesh=sharding.column_mesh())
    for steps in ((0, 1), (2, 3, 4)):
        for step in steps:
            is_last = step == steps[-1]
            model.set_requires_all_reduce(is_last)
            with trace.record() as recorder:
                iterate(model, step)
            assert (recorder.count("RS"), recorder.count("AR")) == (0, 5 * is_last)
            assert bool(values.full_gradients(model)) is is_last
        values.assert_same(values.full_gradients(model), values.mean_gradients(seeded(), steps))
        model.zero_grad()


@pytest.mark.spec("FS2-SYNC-01", "NEW-08")
@with_replicas
@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@ranks(4)
def test_units_inside_are_reduced_over_all_ranks_if_the_root_alone_is_not(mesh: str, setting: str) -> None:
    """Defect: the setting for the gradients of one unit stops the all-reduce of the units inside it."""
    model = sharding.sharded(mesh=getattr(sharding, mesh)())
    getattr(model, setting)(False, recurse=False)
    iterate(model)
    expected = {name: value for name, value in values.mean_gradients(seeded()).items() if name.startswith("blocks.")}
    values.assert_same(values.full_gradients(model), expected)
    getattr(model, setting)(True, recurse=False)
    iterate(model, 1)
    values.assert_same(values.full_gradients(model), values.mean_gradients(seeded(), (0, 1)))


@pytest.mark.spec("NEW-15")
@with_replicas
@ranks(4)
def test_reset_iter_state_drops_the_partial_sum(mesh: str) -> None:
    """Defect: `reset_iter_state` keeps the partial sum, and the next all-reduce includes it."""
    model = sharding.sharded(mesh=getattr(sharding, mesh)())
    model.set_requires_all_reduce(False)
    iterate(model, 7)
    with pytest.raises(IndexError, match="index 9 is out of range"):
        model(batch(), order=[0, 9])
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    iterate(model)
    values.assert_same(values.full_gradients(model), values.mean_gradients(seeded()))


# --- hooks ---


@pytest.mark.spec("NEW-09")
@pytest.mark.parametrize("mesh", ["grid_mesh", "line_mesh"])
@ranks(4)
def test_all_reduce_hook_gets_the_mean_gradient_of_each_group(mesh: str) -> None:
    layers = [nn.Linear(8, 8, device=device()) for _ in range(2)]
    for layer in layers:
        fully_shard(layer, mesh=getattr(sharding, mesh)())
    seen: list[tuple[nn.Module, torch.Tensor]] = []
    for layer in layers:
        layer.set_all_reduce_hook(lambda reduced, layer=layer: seen.append((layer, reduced.clone())))
    layers[1](layers[0](batch(width=8))).square().mean().backward()
    assert [layer for layer, _ in seen] == layers[::-1]
    for layer, reduced in seen:
        # The number of rows is divisible by the number of ranks, so there is no padding.
        mine = [parameter.grad.to_local().reshape(-1) for parameter in layer.parameters()]
        assert torch.equal(reduced.reshape(-1), torch.cat(mine))


@pytest.mark.spec("NEW-09")
@ranks(4)
def test_an_unknown_stream_for_the_hook_is_refused() -> None:
    with pytest.raises(ValueError, match="stream"):
        sharding.sharded(mesh=sharding.grid_mesh()).set_all_reduce_hook(print, stream=object())


@pytest.mark.spec("NEW-09")
@ranks(2)
def test_all_reduce_hook_changes_the_gradients_of_its_own_group_only() -> None:
    """Defect: `set_all_reduce_hook` also sets the hook of inner modules."""
    model, expected = sharding.sharded(), values.mean_gradients(seeded())
    model.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    model.blocks[1].set_all_reduce_hook(lambda reduced: reduced.mul_(4))
    iterate(model)
    factors = {name: 4 if "blocks.1." in name else 1 if "blocks." in name else 2 for name in expected}
    values.assert_same(values.full_gradients(model), {name: factors[name] * expected[name] for name in expected})


# --- factors ---


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("mesh", ["grid_mesh", "line_mesh"])
@pytest.mark.parametrize("sums_only", [False, True])
@ranks(4)
def test_a_factor_replaces_the_division_by_the_number_of_ranks(sums_only: bool, mesh: str) -> None:
    model, expected = sharding.sharded(mesh=getattr(sharding, mesh)()), values.mean_gradients(seeded())
    model.set_gradient_divide_factor(1.0)
    model.blocks[1].set_gradient_divide_factor(8.0)
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(sums_only)
    iterate(model)
    # The mean of four ranks is their sum divided by 4.
    factors = {name: 4 / 8 if "blocks.1." in name else 1 if "blocks." in name else 4 for name in expected}
    values.assert_same(values.full_gradients(model), {name: factors[name] * expected[name] for name in expected})


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
@ranks(2)
def test_a_factor_replaces_the_number_of_ranks_on_a_mesh_of_any_shape(sizes: tuple[int, ...]) -> None:
    mesh, expected = init_device_mesh(device().type, sizes), values.mean_gradients(seeded())
    model = fully_shard(seeded(), mesh=mesh)
    model.set_gradient_divide_factor(8.0)
    iterate(model)
    # The sum of two ranks divided by 8, instead of by 2.
    values.assert_same(values.full_gradients(model), {name: gradient / 4 for name, gradient in expected.items()})


@pytest.mark.spec("NEW-10")
@ranks(2)
def test_the_older_name_of_the_factor_warns_and_works() -> None:
    model, expected = fully_shard(seeded()), values.mean_gradients(seeded())
    # The class of torch's warning.
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(1.0)
    iterate(model)
    values.assert_same(values.full_gradients(model), {name: gradient * 2 for name, gradient in expected.items()})


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
    # Two of these are more than float16 can hold (65504).
    x = torch.full((1, 1), 40000.0, dtype=model.weight.dtype, device=device())
    model(x).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[80000.0 / factor]] * 2


# --- unused and frozen parameters ---


@pytest.mark.spec("NEW-14", "PAR-06")
@pytest.mark.parametrize("syncs", [[True], [True, True], [False, True]], ids=str)
@ranks(2)
def test_ranks_that_take_different_branches_train_like_one_process(syncs: list[bool]) -> None:
    model, plain = fully_shard(seeded()), seeded()
    model.set_reduce_scatter_unused_params(True)
    for step, sync in enumerate(syncs):
        model.set_requires_gradient_sync(sync)
        # Rank 0 uses only the first block, and rank 1 only the second.
        model(batch(step), order=[dist.get_rank()]).square().mean().backward()
        for rank in range(2):
            (plain(batch(step, rank), order=[rank]).square().mean() / 2).backward()
    for name, parameter in plain.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), expected)


@pytest.mark.spec("NEW-14")
@ranks(2)
def test_reduce_scatter_of_unused_params_can_be_set_for_one_module() -> None:
    model = seeded()
    for block in model.blocks:
        block.unused = nn.Linear(2, 2, device=device())
    sharding.sharded(model)
    model.set_reduce_scatter_unused_params(True)
    model.blocks[0].set_reduce_scatter_unused_params(False, recurse=False)
    iterate(model)
    assert [block.unused.weight.grad is not None for block in model.blocks] == [False, True, True, True]
    assert not model.blocks[1].unused.weight.grad.full_tensor().any()


@pytest.mark.spec("NEW-14")
@pytest.mark.parametrize("frozen", ["blocks.1.linear.weight", "blocks.1.linear", "enter.bias"])
@ranks(2)
def test_frozen_parameters_do_not_count_as_unused_and_get_no_weight_decay(frozen: str) -> None:
    """Defect: a parameter without a gradient counts as zeros even if it is frozen; the optimizer then decays it."""
    model, plain = sharding.sharded(), seeded()
    model.set_reduce_scatter_unused_params(True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        iterate(model, step, optimizer)
    for name, value in values.full_values(model).items():
        assert torch.equal(value, plain.get_parameter(name)) is name.startswith(frozen)
