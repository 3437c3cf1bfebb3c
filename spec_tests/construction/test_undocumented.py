"""Public features of torch's `fully_shard` that its documentation does not describe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from minifsdp.engine.comm_streams import CommStream
from minifsdp.fsdp2.fsdp_state import state_of
from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models import MODELS
from spec_tests.models.apis import FULLY_SHARD
from spec_tests.models.modules import WIDTH, seeded, wide
from spec_tests.models.running import batch, iterate, loss_of, of_unit, recorded_iteration
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD, sharded
from spec_tests.models.values import assert_same, full_gradients, full_values, mean_gradients
from spec_tests.oracles import Recipe, assert_same_training, tolerance_for, train_fsdp2, train_single
from spec_tests.prefetch.test_counts import WHOLE
from spec_tests.subject import DataParallelMeshDims, fully_shard, register_fsdp_forward_method, share_comm_ctx, trace

# --- switches for memory (NEW-06, NEW-11) ---


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_reshard_after_forward_is_switchable() -> None:
    model = sharded()
    for choice in (True, False, True):
        model.set_reshard_after_forward(choice)
        assert recorded_iteration(model) == WHOLE[choice]
    model = sharded()
    model.set_reshard_after_forward(True, recurse=False)
    assert recorded_iteration(model) == WHOLE[True]
    model.blocks[2].set_reshard_after_forward(False)
    with trace.record() as recorder:
        loss_of(model(batch()))
    assert "FREE" not in of_unit(recorder, "blocks.2")
    assert "FREE" in of_unit(recorder, "blocks.1")


@pytest.mark.spec("NEW-06")
@pytest.mark.parametrize("choice", ["yes", 2, None])
@ranks(2)
def test_set_reshard_after_forward_requires_bool(choice: Any) -> None:
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool"):
        sharded().set_reshard_after_forward(choice)


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_kept_params_need_no_all_gather_in_next_forward() -> None:
    model = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for num_gathers in (5, 0, 0):
        with trace.record() as recorder:
            iterate(model)
        assert (recorder.count("AG"), recorder.count("FREE"), recorder.count("RS")) == (num_gathers, 0, 5)
    model.set_reshard_after_backward(True)
    iterate(model)
    assert {type(p.data) for p in model.parameters()} == {DTensor}
    model.set_reshard_after_backward(False, recurse=False)
    with trace.record() as recorder:
        iterate(model)
    assert recorder.order("FREE") == [f"FREE blocks.{index}" for index in (3, 2, 1, 0)]


@pytest.mark.spec("NEW-06")
@ranks(2)
def test_an_evaluation_does_not_free_params_that_are_kept_after_backward() -> None:
    model = sharded()
    model.set_reshard_after_backward(False)
    iterate(model)
    for _ in range(2):
        with trace.record() as recorder, torch.no_grad():
            model(batch())
        assert of_unit(recorder, "", "AG", "FREE") == []


@pytest.mark.spec("NEW-11")
@ranks(2)
def test_group_unneeded_in_backward_is_not_all_gathered_there() -> None:
    model, plain = (seeded(lambda: nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4))) for _ in range(2))
    for part in (model[0], model[1], model):
        fully_shard(part)
    model[0].set_unshard_in_backward(False)
    for step in range(2):
        model.zero_grad()
        plain.zero_grad()
        for rank in range(2):
            (loss_of(plain(tokens(step, rank))) / 2).backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        with trace.record() as recorder:
            loss_of(model(tokens(step, dist.get_rank()))).backward()
        assert of_unit(recorder, "0", "AG", "RS") == ["AG", "RS"]
        assert of_unit(recorder, "1", "AG", "RS") == ["AG", "AG", "RS"]
        assert_same(full_gradients(model), expected)


def tokens(step: int, rank: int) -> Tensor:
    dice = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(11, (4, 3), generator=dice).to(device())


# --- hooks and division factors of the reduction (NEW-09, NEW-10) ---


@pytest.mark.spec("NEW-09")
@ranks(2)
def test_all_reduce_hook_gets_the_reduced_gradient_of_each_group_before_the_parameters() -> None:
    compare_in_hook(FULLY_SHARD.shard(wide()))


@pytest.mark.spec("NEW-09")
@ranks(4)
def test_all_reduce_hook_with_replicas_is_called_after_the_all_reduce() -> None:
    model = FULLY_SHARD.shard(wide(), strategy=HYBRID_SHARD)
    compare_in_hook(model)
    with pytest.raises(ValueError, match="stream"):
        model.set_all_reduce_hook(print, stream=object())


def compare_in_hook(model: Any) -> None:
    seen: dict[str, list[Tensor]] = {}
    units = {"": model, **{f"blocks.{index}": block for index, block in enumerate(model.blocks)}}
    for name, module in units.items():
        module.set_all_reduce_hook(lambda reduced, name=name: seen.setdefault(name, []).append(reduced.clone()))
    iterate(model)
    assert sorted(seen) == sorted(units)
    for name, module in units.items():
        owners = (model.enter, model.leave) if module is model else (module,)
        mine = [p.grad.to_local().reshape(-1) for owner in owners for p in owner.parameters()]
        (reduced,) = seen[name]
        assert torch.equal(reduced.reshape(-1), torch.cat(mine)), name
    assert_same(full_gradients(model), mean_gradients(wide()))


@pytest.mark.spec("NEW-09")
@ranks(2)
def test_all_reduce_hook_changes_optimizer_gradient() -> None:
    model = sharded()
    model.blocks[1].set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    iterate(model)
    expected = mean_gradients(seeded())
    for name in expected:
        expected[name] = expected[name] * (2 if name.startswith("blocks.1") else 1)
    assert_same(full_gradients(model), expected)


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD])
@pytest.mark.parametrize("sums_only", [False, True])
@ranks(4)
def test_a_factor_replaces_the_division_by_the_number_of_ranks(sums_only: bool, strategy: Any) -> None:
    model = FULLY_SHARD.shard(strategy=strategy)
    model.set_gradient_divide_factor(1.0)
    model.blocks[1].set_gradient_divide_factor(8.0)
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(sums_only)
    iterate(model)
    factors = {"blocks.1": 8.0, "enter": 1.0, "leave": 1.0}
    expected = mean_gradients(seeded())
    for name in expected:
        factor = next((f for prefix, f in factors.items() if name.startswith(prefix)), 4.0)
        expected[name] = expected[name] * 4 / factor
    assert_same(full_gradients(model), expected)


@pytest.mark.spec("NEW-10")
@ranks(2)
def test_sum_only_communication_changes_no_bit() -> None:
    model = sharded()
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    iterate(model)
    assert_same(full_gradients(model), mean_gradients(seeded()))


@pytest.mark.spec("NEW-10")
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2,)], ids=str)
@ranks(2)
def test_a_factor_replaces_the_number_of_ranks_on_a_mesh_of_any_shape(sizes: tuple[int, ...]) -> None:
    model = fully_shard(seeded(), mesh=init_device_mesh(device().type, sizes))
    model.set_gradient_divide_factor(8.0)
    iterate(model)
    # The sum of two ranks divided by 8, instead of by 2.
    expected = {name: gradient / 4 for name, gradient in mean_gradients(seeded()).items()}
    assert_same(full_gradients(model), expected)


@pytest.mark.spec("NEW-10")
@ranks(2)
def test_the_older_name_of_the_factor_warns_and_works() -> None:
    model = sharded()
    # The class of torch's warning.
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.blocks[0].set_reduce_scatter_divide_factor(1.0)
    iterate(model)
    expected = mean_gradients(seeded())["blocks.0.linear.weight"] * 2
    assert_same({"w": model.blocks[0].linear.weight.grad.full_tensor()}, {"w": expected})


# --- other forward methods and events (NEW-12, NEW-13) ---


@pytest.mark.spec("NEW-12")
@ranks(2)
def test_only_the_next_iteration_waits_for_the_event_after_the_optimizer_step() -> None:
    """Checks the event that is passed to the all-gather stream. The wait only matters on a device with streams."""
    model, usual = sharded(), sharded()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, usual)]
    given, followed = [step_event() if step < 2 else None for step in range(4)], []
    for step, event in enumerate(given):
        with mock.patch.object(
            CommStream, "wait_compute", autospec=True, side_effect=CommStream.wait_compute
        ) as wait_compute:
            loss = loss_of(model(batch(step)))
        followed.append([event for call in wait_compute.call_args_list for event in call.args[1:] if event is not None])
        loss.backward()
        iterate(usual, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if event is not None:
            event.record()
            model.set_post_optim_event(event)
    assert followed == [[], [given[0]], [given[1]], []]
    assert_same(full_values(model), full_values(usual))


def step_event() -> Any:
    """An event of the device. On a device without events, a substitute that is always complete."""
    return torch.get_device_module(device()).Event() if device().type != "cpu" else Recorded()


class Recorded:
    """Replaces an event on a device without streams, where all previous work is already complete."""

    def record(self, stream: Any = None) -> None:
        """Does nothing."""

    def wait(self, stream: Any = None) -> None:
        """Returns immediately."""


class Generates(nn.Module):
    """Has two methods that run a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x))

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.enter(x) * scale


@pytest.mark.spec("NEW-13")
@ranks(2)
def test_registered_method_all_gathers_and_reshards() -> None:
    model, plain = seeded(Generates), seeded(Generates)
    fully_shard(model, reshard_after_forward=True)
    register_fsdp_forward_method(model, "encode")
    assert inspect.signature(model.encode) == inspect.signature(plain.encode)
    for step in range(2):
        with trace.record() as recorder:
            output = model.encode(batch(step), scale=0.5)
        assert recorder.order("AG", "F", "FREE") == ["AG", "F", "FREE"]
        assert torch.equal(output, plain.encode(batch(step), scale=0.5))
        loss_of(output).backward()
        plain.zero_grad()
        for rank in range(2):
            (loss_of(plain.encode(batch(step, rank), scale=0.5)) / 2).backward()
        assert torch.equal(model.enter.weight.grad.full_tensor(), plain.enter.weight.grad)
        assert model.leave.weight.grad is None
        model.zero_grad()
    assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.spec("NEW-13")
@ranks(2)
def test_register_forward_method_ignores_other_modules_and_refuses_a_missing_method() -> None:
    plain = seeded(Generates)
    register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)
    with pytest.raises(ValueError, match="decode"):
        register_fsdp_forward_method(fully_shard(plain), "decode")


# --- parameters that only some ranks use (NEW-14) ---


def reducing_unused(module: nn.Module) -> Any:
    sharded_module = fully_shard(module)
    sharded_module.set_reduce_scatter_unused_params(True)
    return sharded_module


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
    with_gradient = [block.unused.weight.grad is not None for block in model.blocks]
    assert with_gradient == [False, True, True, True]
    assert torch.equal(model.blocks[1].unused.weight.grad.full_tensor(), torch.zeros(2, 2, device=device()))


# --- names (NEW-17, NEW-18) ---


@pytest.mark.spec("NEW-17", "MIG-21")
@pytest.mark.pure
def test_the_names_are_those_of_torch() -> None:
    for name in (
        "fully_shard",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "CPUOffloadPolicy",
        "UnshardHandle",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    ):
        assert getattr(subject.engine, name).__name__ == getattr(torch_fsdp, name).__name__ == name
        assert name in subject.engine.__all__


def two_stages() -> list[Any]:
    """Two models whose steps have different units."""
    return [sharded(seeded()), fully_shard(seeded(Generates))]


@pytest.mark.spec("NEW-17")
@ranks(2)
def test_several_roots_that_share_comm_streams_compute_the_same() -> None:
    stages, usual = two_stages(), two_stages()
    share_comm_ctx(stages)
    share_comm_ctx([])
    for step in range(2):
        for mine, other in zip(stages, usual, strict=True):
            assert iterate(mine, step) == iterate(other, step)
            assert_same(full_gradients(mine), full_gradients(other))
    with pytest.raises(ValueError, match="FSDPModule"):
        share_comm_ctx([stages[0], nn.Linear(2, 2)])


@pytest.mark.spec("NEW-17")
@ranks(2)
def test_roots_have_the_same_comm_streams_only_after_sharing_them() -> None:
    for is_shared in (True, False):
        stages = two_stages()
        if is_shared:
            share_comm_ctx(stages)
        for stage in stages:
            iterate(stage)
        first, second = (state_of(stage).root_state.comm_streams for stage in stages)
        assert (first is second) is is_shared


@pytest.mark.spec("NEW-17")
@pytest.mark.parametrize("moment", ["after a step", "between forward and backward", "after another call"])
@ranks(2)
def test_streams_can_be_shared_at_any_time(moment: str) -> None:
    stages, usual = two_stages(), two_stages()
    if moment == "after a step":
        for stage in (*stages, *usual):
            iterate(stage)
            stage.zero_grad()
    if moment == "after another call":
        share_comm_ctx(stages[1:])
        iterate(stages[1])
        stages[1].zero_grad()
    losses = [stage(batch()).square().mean() for stage in (*stages, *usual)]
    share_comm_ctx(stages)
    for loss in losses:
        loss.backward()
    for mine, other in zip(stages, usual, strict=True):
        assert_same(full_gradients(mine), full_gradients(other))
    states = [state_of(stage).root_state for stage in stages]
    used = {id(unit.root.comm_streams) for state in states for unit in state.units}
    assert used == {id(states[0].comm_streams)} == {id(states[1].comm_streams)}


SPECIAL: dict[str, Callable[[Any], Any]] = {
    "set_custom_all_gather": lambda model: model.set_custom_all_gather(object()),
    "set_custom_reduce_scatter": lambda model: model.set_custom_reduce_scatter(object()),
    "set_allocate_memory_from_process_group_for_comm": lambda model: (
        model.set_allocate_memory_from_process_group_for_comm(True)
    ),
    "set_symm_mem_for_comm": lambda model: model.set_symm_mem_for_comm(),
    "set_separate_reduce_scatter_group": lambda model: model.set_separate_reduce_scatter_group(),
    "set_reduce_scatter_max_input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    "dp_mesh_dims": lambda model: fully_shard(seeded(), dp_mesh_dims=object()),
}


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize("name", SPECIAL)
@ranks(2)
def test_special_hardware_option_works_or_names_alternative(name: str) -> None:
    model = sharded()
    message = None
    try:
        SPECIAL[name](model)
    except NotImplementedError as refused:
        message = str(refused)
    if message is not None:
        assert name in message
        assert any(word in message for word in ("use ", "pass "))
    iterate(model)
    assert_same(full_gradients(model), mean_gradients(seeded()))


def outcome(call: Callable[[], Any]) -> str:
    """The name of the exception that a call raises; "ok" if it raises none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "ok"


# The name and arguments of a method, and its outcome in torch 2.13.
VALUES: list[tuple[str, Any, str]] = [
    ("set_reduce_scatter_max_input_buffers", 1, "ok"),
    ("set_reduce_scatter_max_input_buffers", 0, "ValueError"),
    ("set_reduce_scatter_max_input_buffers", -1, "ValueError"),
    ("set_reduce_scatter_max_input_buffers", True, "TypeError"),
    ("set_reduce_scatter_max_input_buffers", False, "TypeError"),
    ("set_reduce_scatter_max_input_buffers", 1.0, "TypeError"),
    ("set_reduce_scatter_max_input_buffers", "1", "TypeError"),
    ("set_separate_reduce_scatter_group", False, "ok"),
    ("set_allocate_memory_from_process_group_for_comm", False, "ok"),
    ("_set_unshard_async_op", True, "ok"),
    ("_set_unshard_async_op", False, "ok"),
]


@pytest.mark.spec("NEW-18")
@pytest.mark.parametrize(("name", "value", "in_torch"), VALUES)
@ranks(2)
def test_the_default_of_an_option_has_no_effect_and_a_wrong_value_has_the_error_of_torch(
    name: str, value: Any, in_torch: str
) -> None:
    model, theirs = sharded(), torch_fsdp.fully_shard(seeded())
    # Torch 2.11 does not have all of these methods.
    if hasattr(torch_fsdp.FSDPModule, name):
        assert outcome(lambda: getattr(theirs, name)(value)) == in_torch
    assert outcome(lambda: getattr(model, name)(value)) == in_torch
    iterate(model)
    assert_same(full_gradients(model), mean_gradients(seeded()))


DIMS: list[tuple[dict[str, Any], Any]] = [
    ({}, "ValueError"),
    ({"shard": None, "replicate": None}, "ValueError"),
    ({"shard": "dp"}, (("dp",), ())),
    ({"shard": ("dp", "cp")}, (("dp", "cp"), ())),
    ({"replicate": "pods"}, ((), ("pods",))),
    ({"shard": ["dp"], "replicate": ("pods", "racks")}, (("dp",), ("pods", "racks"))),
    ({"shard": ()}, ((), ())),
    ({"shard": ""}, (("",), ())),
]


@pytest.mark.spec("NEW-18")
@pytest.mark.pure
@pytest.mark.parametrize(("given", "in_torch"), DIMS)
def test_dimensions_for_data_parallelism_are_those_of_torch(given: dict[str, Any], in_torch: Any) -> None:
    def names(cls: Any) -> Any:
        try:
            dims = cls(**given)
        except ValueError as error:
            return type(error).__name__
        dims.shard = dims.shard  # not frozen
        return dims.shard_names, dims.replicate_names

    if hasattr(torch_fsdp, "DataParallelMeshDims"):
        assert names(torch_fsdp.DataParallelMeshDims) == in_torch
    assert names(DataParallelMeshDims) == in_torch


@pytest.mark.spec("NEW-18")
@pytest.mark.pure
def test_the_error_without_dimensions_names_both_arguments() -> None:
    with pytest.raises(ValueError, match=r"rank 0: .*shard=.*replicate="):
        DataParallelMeshDims()


@pytest.mark.spec("NEW-05", "ORIG-16")
@ranks(2)
def test_an_error_for_the_number_of_ranks_leaves_the_module_as_it_was() -> None:
    layer = nn.Linear(4, 4, device=device())
    weight = layer.weight
    with pytest.raises(ValueError, match="reshard_after_forward"):
        subject.fully_shard(layer, reshard_after_forward=3)
    assert type(layer) is nn.Linear
    assert layer.weight is weight
    subject.fully_shard(layer)
