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

from spec_tests.harness import device, ranks
from spec_tests.models.apis import FULLY_SHARD, SETTINGS, WRAPPED, Api, all_apis, settings_of
from spec_tests.models.modules import Stack, seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, sharded
from spec_tests.subject import fully_shard, register_fsdp_forward_method, trace

Optimizer = torch.optim.Optimizer
NO_GRADIENTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
NOT_SIMULATED = pytest.mark.not_simulated("it cannot view a part of a flat tensor in inference mode")
EVERY_SETTING = [*SETTINGS, (WRAPPED, SHARD_GRAD_OP)]


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(batch(0, 0))
    return output.clone()


def backward(model: nn.Module) -> None:
    loss_of(model(batch(0, 0))).backward()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_shows_shards(model: nn.Module, owned: list[nn.Parameter]) -> None:
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in owned]


@pytest.mark.spec("FRESH-01")
@pytest.mark.parametrize("mode", ["no_grad", pytest.param("inference_mode", marks=NOT_SIMULATED)])
@settings_of(*EVERY_SETTING)
@ranks(2)
def test_after_an_evaluation_the_modules_show_sharded_parameters(api: Api, strategy: Any, mode: str) -> None:
    model = api.shard(strategy=strategy)
    owned = list(model.parameters())
    for before in (lambda: None, lambda: model(batch(0, 0)), lambda: backward(model)):
        before()
        with NO_GRADIENTS[mode]():
            model(batch(0, 0))
        assert_shows_shards(model, owned)
    # An original parameter without elements on this rank has no gradient.
    assert all(parameter.grad is not None for parameter in owned if parameter.numel())


@pytest.mark.spec("FRESH-01")
@settings_of(*EVERY_SETTING)
@ranks(2)
def test_modules_show_shards_after_a_forward_without_requires_grad(api: Api, strategy: Any) -> None:
    model = api.shard(seeded().requires_grad_(False), strategy=strategy)
    owned = list(model.parameters())
    for _ in range(2):
        torch.testing.assert_close(model(batch()), seeded()(batch()))
        assert_shows_shards(model, owned)


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
    plain, model = seeded(Generates), sharded(seeded(Generates), reshard_after_forward=keeps)
    owned = list(model.parameters())
    register_fsdp_forward_method(model, "generate")
    for _ in range(2):
        with torch.set_grad_enabled(records):
            torch.testing.assert_close(model.generate(batch()), plain.generate(batch()))
        if keeps is None:
            assert_shows_shards(model, owned)
        else:
            # The blocks can stay unsharded, because a backward through the method's results is possible.
            assert all(isinstance(parameter, DTensor) for parameter in model.leave.parameters())
        for one in (model, plain):
            optimizer = sgd(one)
            backward(one)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.spec("FRESH-01")
@ranks(2)
def test_a_loss_that_is_not_in_the_output_still_has_its_backward() -> None:
    class Sideways(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.loss = super().forward(x).square().mean()
            return self.loss.detach()

    plain, model = seeded(Sideways), sharded(seeded(Sideways))
    owned = list(model.parameters())
    for one in (model, plain):
        one(batch(0, 0))
    assert_shows_shards(model, owned)
    for one in (model, plain):
        one.loss.backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


# --- common operations after an evaluation ---


Edit = Callable[[nn.Module], Optimizer | None]


def each_parameter(change: Callable[[nn.Parameter], object]) -> Edit:
    def edit(model: nn.Module) -> None:
        for parameter in model.parameters():
            change(parameter)

    return edit


def scale_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def scale_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.25)


def scale_by_a_list_operator(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def freeze_and_thaw(model: nn.Module) -> Optimizer:
    model.requires_grad_(False)
    evaluate(model)
    model.requires_grad_(True)
    return sgd(model)


def evaluate_average(model: nn.Module) -> None:
    """Evaluates with other weights, as for an exponential moving average, and then restores the previous ones."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    each_parameter(scale_in_place)(model)
    evaluated.append(evaluate(model))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    evaluated.append(evaluate(model))


evaluated: list[Tensor] = []
# An edit may return a new optimizer.
EDITS: dict[str, Edit] = {
    "new optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
    "scaled": each_parameter(scale_in_place),
    "scaled by data": each_parameter(lambda parameter: parameter.data.mul_(0.5)),
    "scaled by a list operator": scale_by_a_list_operator,
    "gradients scaled": each_parameter(scale_gradient),
    "gradients dropped": each_parameter(lambda parameter: setattr(parameter, "grad", None)),
    "frozen and thawed": freeze_and_thaw,
    "averaged": evaluate_average,
}
# The root, or every unit, stays unsharded after a forward.
KEEPS_ROOT = [setting for setting in EVERY_SETTING if setting[1] is not NO_SHARD]
WITHOUT_A_TRACE = ["scaled by data", "scaled by a list operator"]
PLACES = ["before the step", "between micro-batches", "between backward and step", "logged"]


def run(model: nn.Module, place: str, edit: Edit) -> list[Tensor]:
    evaluated.clear()
    optimizer = sgd(model)

    def visit(here: str) -> None:
        nonlocal optimizer
        if here == place:
            evaluated.append(evaluate(model))
            optimizer = edit(model) or optimizer

    for _ in range(2):
        visit("before the step")
        backward(model)
        visit("between micro-batches")
        backward(model)
        visit("between backward and step")
        optimizer.step()
        optimizer.zero_grad()
        if place == "logged":
            # A forward recorded by autograd but without a backward, followed by an evaluation.
            model(batch())
            visit("logged")
    backward(model)
    optimizer.step()
    return [*evaluated, evaluate(model)]


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("place", PLACES)
@settings_of(*EVERY_SETTING)
@ranks(2)
def test_changes_of_params_after_evaluation_persist(api: Api, strategy: Any, place: str) -> None:
    for name, edit in EDITS.items():
        if name in WITHOUT_A_TRACE and (api, strategy) in KEEPS_ROOT:
            # Parameters that stay unsharded are not all-gathered again. torch does the same. See the next tests.
            continue
        plain, model = seeded(), api.shard(strategy=strategy)
        torch.testing.assert_close(run(model, place, edit), run(plain, place, edit))


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("name", ["scaled", *WITHOUT_A_TRACE])
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@all_apis
@ranks(2)
def test_evaluation_after_an_evaluation_uses_every_kind_of_change(api: Api, strategy: Any, name: str) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    # The root stays unsharded, so a change that is not counted is only used in the blocks.
    only_blocks = name in WITHOUT_A_TRACE and strategy is FULL_SHARD
    for _ in range(2):
        for one in (model, plain):
            evaluate(one)
            EDITS[name](one.blocks if only_blocks else one)
        torch.testing.assert_close(evaluate(model), evaluate(plain))


@pytest.mark.spec("FRESH-03")
@pytest.mark.parametrize("name", WITHOUT_A_TRACE)
@pytest.mark.parametrize("reshards", [False, True])
@settings_of(*KEEPS_ROOT)
@ranks(2)
def test_a_change_that_is_not_counted_is_used_after_a_reshard_or_a_backward(
    api: Api, strategy: Any, reshards: bool, name: str
) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for one in (model, plain):
        evaluate(one)
        EDITS[name](one)
    if reshards and api == FULLY_SHARD:
        api.reshard(model)
    else:
        backward(model)
    torch.testing.assert_close(evaluate(model), evaluate(plain))


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("keeps", [None, True, False])
@ranks(2)
def test_submodule_is_converted_partly_frozen_and_tied_after_an_evaluation(keeps: bool | None) -> None:
    class Equal(Stack):
        """The two layers of the root have equal shapes."""

        def __init__(self) -> None:
            super().__init__()
            self.leave = nn.Linear(6, 6)

    plain, model = seeded(Equal), sharded(seeded(Equal), reshard_after_forward=keeps)
    x, results = batch(0, 0), list[Tensor]()
    for one in (model, plain):
        evaluate(one)
        one.leave.to(torch.float64)
        one.to(torch.float64)
        with torch.no_grad():
            one(x.double())
        one.leave.weight = one.enter.weight
        one.enter.bias.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        loss_of(one(x.double())).backward()
        optimizer.step()
        with torch.no_grad():
            results.append(one(x.double()))
    torch.testing.assert_close(*results)


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("keeps", [None, False])
@ranks(2)
def test_optimizer_state_is_saved_and_loaded_after_an_evaluation(keeps: bool | None) -> None:
    model = sharded(reshard_after_forward=keeps)
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
@settings_of(*EVERY_SETTING)
@ranks(2)
def test_an_optimizer_in_backward_that_is_attached_after_an_evaluation_steps(api: Api, strategy: Any) -> None:
    plain, model = seeded(), api.shard(strategy=strategy)
    for one in (model, plain):
        evaluate(one)
        for parameter in one.parameters():
            alone = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda p, alone=alone: (alone.step(), alone.zero_grad())[0])
        for _ in range(2):
            backward(one)
    torch.testing.assert_close(evaluate(model), evaluate(plain))


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
        torch.testing.assert_close(model(x.double()), plain.double()(x.double()))


@pytest.mark.spec("SHARD-14")
@ranks(2)
def test_an_evaluation_before_a_backward_frees_all_units_except_the_root() -> None:
    model = WRAPPED.shard()
    loss = model(batch()).sum()
    with trace.record() as recorder:
        evaluate(model)
    assert recorder.order("FREE") == [f"FREE blocks.{index}" for index in range(4)]
    loss.backward()
