"""The parameters of modules after a forward without a possible backward, with both APIs.

Each program runs on the sharded model and on an unsharded copy. Both ranks have the same batch, so the mean of the
gradients over the ranks equals the gradient of the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from spec_tests.harness import device, ranks
from spec_tests.models import apis
from spec_tests.models.modules import Stack, seeded
from spec_tests.models.running import batch
from spec_tests.subject import ShardingStrategy, fully_shard, register_fsdp_forward_method, trace

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = [*ShardingStrategy][:3]
EVERY_SETTING = [*apis.SETTINGS, (apis.WRAPPED, SHARD_GRAD_OP)]
# The root, or every unit, stays unsharded after a forward.
KEEPS_ROOT = [setting for setting in EVERY_SETTING if setting[1] is not NO_SHARD]
NO_GRADIENTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
NOT_SIMULATED = pytest.mark.not_simulated("it cannot view a part of a flat tensor in inference mode")


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(batch(rank=0))
    return output.clone()


def backward(model: nn.Module) -> None:
    model(batch(rank=0)).square().mean().backward()


# --- the parameters of the modules ---


@pytest.mark.spec("FRESH-01")
@pytest.mark.parametrize("mode", ["no_grad", pytest.param("inference_mode", marks=NOT_SIMULATED)])
@apis.settings_of(*EVERY_SETTING)
@ranks(2)
def test_after_an_evaluation_the_modules_show_sharded_parameters(api: apis.Api, strategy: Any, mode: str) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    owned = list(model.parameters())
    for before in (lambda: None, lambda: model(batch()), lambda: backward(model)):
        before()
        with NO_GRADIENTS[mode]():
            assert_close(model(batch()), plain(batch()))
        assert all(parameter is mine for parameter, mine in zip(model.parameters(), owned, strict=True))
    # An original parameter without elements on this rank has no gradient.
    assert all(parameter.grad is not None for parameter in owned if parameter.numel())


@pytest.mark.spec("FRESH-01")
@apis.settings_of(*EVERY_SETTING)
@ranks(2)
def test_modules_show_shards_after_a_forward_without_requires_grad(api: apis.Api, strategy: Any) -> None:
    model = api.shard(seeded().requires_grad_(False), strategy=strategy)
    owned = list(model.parameters())
    for _ in range(2):
        assert_close(model(batch()), seeded()(batch()))
        assert all(parameter is mine for parameter, mine in zip(model.parameters(), owned, strict=True))


class Generates(Stack):
    """Has a method that calls the forward several times."""

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self(x).sum().detach()
        return x


@pytest.mark.spec("FRESH-01")
@pytest.mark.parametrize("keeps", [None, False])
@pytest.mark.parametrize("records", [False, True])
@ranks(2)
def test_after_a_registered_method_the_module_shows_sharded_parameters(keeps: bool | None, records: bool) -> None:
    plain, model = seeded(Generates), apis.FULLY_SHARD.shard(seeded(Generates), reshard_after_forward=keeps)
    register_fsdp_forward_method(model, "generate")
    for _ in range(2):
        with torch.set_grad_enabled(records):
            assert_close(model.generate(batch()), plain.generate(batch()))
        # The blocks can stay unsharded, because a backward through the method's results is possible.
        shown = model.parameters() if keeps is None else model.leave.parameters()
        assert all(isinstance(parameter, DTensor) for parameter in shown)
        for one in (model, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            backward(one)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.spec("SHARD-14")
@ranks(2)
def test_an_evaluation_before_a_backward_frees_all_units_except_the_root() -> None:
    model = apis.WRAPPED.shard()
    loss = model(batch()).sum()
    with trace.record() as recorder:
        evaluate(model)
    assert recorder.order("FREE") == [f"FREE blocks.{index}" for index in range(4)]
    loss.backward()


# --- common operations after an evaluation ---


def scaled(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def scaled_by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def scaled_by_a_list_operator(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def gradients_scaled(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.25)


def gradients_dropped(model: nn.Module) -> None:
    model.zero_grad()


def frozen_and_thawed(model: nn.Module) -> None:
    model.requires_grad_(False)
    evaluate(model)
    model.requires_grad_(True)


Edit = Callable[[nn.Module], None]
NOT_COUNTED = [scaled_by_data, scaled_by_a_list_operator]
EDITS = [scaled, *NOT_COUNTED, gradients_scaled, gradients_dropped, frozen_and_thawed]


def run(model: nn.Module, place: str, edit: Edit) -> list[Tensor]:
    """Trains for three steps of two micro-batches. At one place of each step, it evaluates and edits the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs: list[Tensor] = []

    def visit(here: str) -> None:
        if here == place:
            outputs.append(evaluate(model))
            edit(model)

    for _ in range(3):
        visit("before the step")
        backward(model)
        visit("between micro-batches")
        backward(model)
        visit("between backward and step")
        optimizer.step()
        optimizer.zero_grad()
        # A forward recorded by autograd but without a backward, followed by an evaluation.
        model(batch())
        visit("logged")
    return [*outputs, evaluate(model)]


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("place", ["before the step", "between micro-batches", "between backward and step", "logged"])
@apis.settings_of(*EVERY_SETTING)
@ranks(2)
def test_changes_of_params_after_evaluation_persist(api: apis.Api, strategy: Any, place: str) -> None:
    # Parameters that stay unsharded are not all-gathered again. torch does the same. See the next tests.
    for edit in [edit for edit in EDITS if edit not in NOT_COUNTED or (api, strategy) not in KEEPS_ROOT]:
        assert_close(run(api.shard(strategy=strategy), place, edit), run(seeded(), place, edit))


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("edit", [scaled, *NOT_COUNTED])
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@apis.all_apis
@ranks(2)
def test_evaluation_after_an_evaluation_uses_every_kind_of_change(api: apis.Api, strategy: Any, edit: Edit) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    # The root stays unsharded, so a change that is not counted is only used in the blocks.
    only_blocks = edit in NOT_COUNTED and strategy is FULL_SHARD
    for _ in range(2):
        for one in (model, plain):
            evaluate(one)
            edit(one.blocks if only_blocks else one)
        assert_close(evaluate(model), evaluate(plain))


@pytest.mark.spec("FRESH-03")
@pytest.mark.parametrize("edit", NOT_COUNTED)
@pytest.mark.parametrize("next_action", ["reshard", "backward"])
@apis.settings_of(*KEEPS_ROOT)
@ranks(2)
def test_a_change_that_is_not_counted_is_used_after_a_reshard_or_a_backward(
    api: apis.Api, strategy: Any, next_action: str, edit: Edit
) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for one in (model, plain):
        evaluate(one)
        edit(one)
    if next_action == "reshard" and api == apis.FULLY_SHARD:
        api.reshard(model)
    else:
        backward(model)
    assert_close(evaluate(model), evaluate(plain))


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("keeps", [None, True, False])
@ranks(2)
def test_submodule_is_converted_partly_frozen_and_tied_after_an_evaluation(keeps: bool | None) -> None:
    plain, model = (seeded(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))) for _ in range(2))
    fully_shard(model[1], reshard_after_forward=keeps)
    fully_shard(model, reshard_after_forward=keeps)
    results = []
    for one in (model, plain):
        evaluate(one)
        one[2].to(torch.float64)
        one.to(torch.float64)
        x = batch(rank=0).double()
        with torch.no_grad():
            one(x)
        one[2].weight = one[0].weight
        one[0].bias.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        one(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            results.append(one(x))
    assert_close(*results)


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("keeps", [None, False])
@ranks(2)
def test_optimizer_state_is_saved_and_loaded_after_an_evaluation(keeps: bool | None) -> None:
    model = apis.FULLY_SHARD.shard(reshard_after_forward=keeps)
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    evaluate(model)
    saved = get_optimizer_state_dict(model, optimizer)
    evaluate(model)
    other = torch.optim.Adam(model.parameters())
    set_optimizer_state_dict(model, other, saved)
    for parameter in model.parameters():
        found, expected = (each.state[parameter]["exp_avg"].to_local() for each in (other, optimizer))
        assert torch.equal(found, expected)


@pytest.mark.spec("FRESH-02")
@apis.settings_of(*EVERY_SETTING)
@ranks(2)
def test_an_optimizer_in_backward_that_is_attached_after_an_evaluation_steps(api: apis.Api, strategy: Any) -> None:
    @torch.no_grad()
    def step(parameter: nn.Parameter) -> None:
        parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    plain, model = seeded(), api.shard(strategy=strategy)
    for one in (model, plain):
        evaluate(one)
        for parameter in one.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            backward(one)
    assert_close(evaluate(model), evaluate(plain))


@pytest.mark.spec("FRESH-02")
@ranks(2)
def test_parameters_of_another_dtype_that_are_assigned_after_an_evaluation_are_used() -> None:
    plain, model = (seeded(lambda: nn.Linear(8, 8)) for _ in range(2))
    fully_shard(model, reshard_after_forward=False)
    x = torch.ones(2, 8, device=device())
    with torch.no_grad():
        model(x)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(parameter.double()))
        assert_close(model(x.double()), plain.double()(x.double()))
