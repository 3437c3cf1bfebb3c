"""Methods of `FSDPModule` that change reductions of gradients and resharding, and options without an effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models import running, sharding, values
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.subject import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard, trace

with_replicas = pytest.mark.parametrize("mesh", ["grid_mesh", "column_mesh"])

# --- when gradients are reduced ---


@pytest.mark.spec("FS2-SYNC-01", "NEW-08")
@with_replicas
@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@ranks(4)
def test_units_inside_are_reduced_over_all_ranks_if_the_root_alone_is_not(mesh: str, setting: str) -> None:
    """Defect: the setting for the gradients of one unit stops the all-reduce of the units inside it."""
    model = sharding.sharded(mesh=getattr(sharding, mesh)())
    getattr(model, setting)(False, recurse=False)
    running.iterate(model)
    expected = {name: value for name, value in values.mean_gradients(seeded()).items() if name.startswith("blocks.")}
    values.assert_same(values.full_gradients(model), expected)
    getattr(model, setting)(True, recurse=False)
    running.iterate(model, 1)
    values.assert_same(values.full_gradients(model), values.mean_gradients(seeded(), (0, 1)))


@pytest.mark.spec("NEW-15")
@with_replicas
@ranks(4)
def test_reset_iter_state_drops_the_partial_sum(mesh: str) -> None:
    """Defect: `reset_iter_state` keeps the partial sum, and the next all-reduce includes it."""
    model = sharding.sharded(mesh=getattr(sharding, mesh)())
    model.set_requires_all_reduce(False)
    running.iterate(model, 7)
    with pytest.raises(IndexError, match="index 9 is out of range"):
        model(running.batch(), order=[0, 9])
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    running.iterate(model)
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
    layers[1](layers[0](running.batch(width=8))).square().mean().backward()
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
    running.iterate(model)
    factors = {name: 4 if "blocks.1." in name else 1 if "blocks." in name else 2 for name in expected}
    values.assert_same(values.full_gradients(model), {name: factors[name] * expected[name] for name in expected})


# --- factors ---


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("mesh", ["grid_mesh", "line_mesh", "column_mesh"])
@pytest.mark.parametrize("sums_only", [False, True])
@ranks(4)
def test_a_factor_replaces_the_division_by_the_number_of_ranks(sums_only: bool, mesh: str) -> None:
    model, expected = sharding.sharded(mesh=getattr(sharding, mesh)()), values.mean_gradients(seeded())
    model.set_gradient_divide_factor(1.0)
    model.blocks[1].set_gradient_divide_factor(8.0)
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(sums_only)
    running.iterate(model)
    # The mean of four ranks is their sum divided by 4.
    factors = {name: 4 / 8 if "blocks.1." in name else 1 if "blocks." in name else 4 for name in expected}
    values.assert_same(values.full_gradients(model), {name: factors[name] * expected[name] for name in expected})


@pytest.mark.spec("NEW-10")
@ranks(2)
def test_the_older_name_of_the_factor_warns_and_works() -> None:
    model, expected = fully_shard(seeded()), values.mean_gradients(seeded())
    # The class of torch's warning.
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(1.0)
    running.iterate(model)
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
        model(running.batch(step), order=[dist.get_rank()]).square().mean().backward()
        for rank in range(2):
            (plain(running.batch(step, rank), order=[rank]).square().mean() / 2).backward()
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
    running.iterate(model)
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
        running.iterate(model, step, optimizer)
    for name, value in values.full_values(model).items():
        assert torch.equal(value, plain.get_parameter(name)) is name.startswith(frozen)


# --- resharding ---


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_reshard_after_forward_is_switchable() -> None:
    model = sharding.sharded()
    for choice in (True, False, True):
        model.set_reshard_after_forward(choice)
        with trace.record() as recorder:
            model(running.batch()).sum().backward()
        # The root and four blocks: once in forward and, if they are resharded after it, once in backward.
        assert (recorder.count("AG"), recorder.count("FREE")) == ((10, 10) if choice else (5, 5))
    model.blocks[2].set_reshard_after_forward(False)
    with trace.record() as recorder:
        model(running.batch())
    assert recorder.order("FREE") == ["FREE blocks.0", "FREE blocks.1", "FREE blocks.3", "FREE"]


@pytest.mark.spec("NEW-06")
@pytest.mark.parametrize("choice", ["yes", 2, None])
@ranks(2)
def test_set_reshard_after_forward_requires_bool(choice: Any) -> None:
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool"):
        sharding.sharded().set_reshard_after_forward(choice)


@pytest.mark.spec("NEW-06")
@pytest.mark.parametrize("setting", ["set_reshard_after_forward", "set_reshard_after_backward"])
@ranks(2)
def test_units_inside_are_freed_if_the_root_alone_is_not(setting: str) -> None:
    model = sharding.sharded(reshard_after_forward=True)
    getattr(model, setting)(False, recurse=False)
    with trace.record() as recorder:
        model(running.batch()).sum().backward()
    freed = recorder.order("FREE")
    assert [freed.count(f"FREE blocks.{index}") for index in range(4)] == [2, 2, 2, 2]
    assert freed.count("FREE") == 1


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_kept_params_need_no_all_gather_in_next_forward() -> None:
    model = sharding.sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for num_gathers in (5, 0, 0):
        with trace.record() as recorder:
            model(running.batch()).sum().backward()
        assert (recorder.count("AG"), recorder.count("FREE"), recorder.count("RS")) == (num_gathers, 0, 5)
    with trace.record() as recorder, torch.no_grad():
        model(running.batch())
    assert recorder.order("AG", "FREE") == [], "an evaluation does not free them"
    model.set_reshard_after_backward(True)
    model(running.batch()).sum().backward()
    assert {type(p.data) for p in model.parameters()} == {DTensor}


@pytest.mark.spec("NEW-11")
@ranks(2)
def test_group_unneeded_in_backward_is_not_all_gathered_there() -> None:
    """The setting does not change inner modules: the linear layer is needed for the gradient of the embedding."""
    model, plain = (seeded(lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4))) for _ in range(2))
    fully_shard(model[1], reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True).set_unshard_in_backward(False)
    tokens = torch.arange(3, device=device())
    with trace.record() as recorder:
        model(tokens).square().mean().backward()
    assert recorder.order("AG", "RS") == ["AG", "AG 1", "AG 1", "RS 1", "RS"]
    model.zero_grad()
    assert_trains_like(model, plain, loss=lambda each, x: (each(tokens) * x[0, :4]).square().mean())


# --- settings without an effect, and names ---


@pytest.mark.spec("NEW-17", "MIG-21")
@pytest.mark.pure
@pytest.mark.parametrize("name", ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"])
def test_the_names_of_classes_are_those_of_torch(name: str) -> None:
    assert getattr(subject.engine, name).__name__ == getattr(torch_fsdp, name).__name__ == name
    assert name in subject.engine.__all__


@pytest.mark.spec("NEW-18")
@ranks(2)
def test_options_have_no_effect_on_training() -> None:
    model = sharding.sharded()
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_separate_reduce_scatter_group(False)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model._set_unshard_async_op(True)
    assert_trains_like(model)


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)]
)
@ranks(2)
def test_a_wrong_value_has_the_error_of_torch(value: Any, error: type[Exception]) -> None:
    models = [sharding.sharded(), torch_fsdp.fully_shard(seeded())]
    # Torch 2.11 does not have this method.
    for model in models if hasattr(torch_fsdp.FSDPModule, "set_reduce_scatter_max_input_buffers") else models[:1]:
        with pytest.raises(error, match=r"max_input_buffers (must|should) be a"):
            model.set_reduce_scatter_max_input_buffers(value)


@pytest.mark.spec("NEW-18")
@pytest.mark.pure
@pytest.mark.parametrize("given", [{}, {"shard": None, "replicate": None}], ids=str)
def test_the_error_without_dimensions_names_both_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rank 0: .*shard=.*replicate="):
        DataParallelMeshDims(**given)
