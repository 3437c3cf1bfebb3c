"""The parameters of modules after a forward without a possible backward, with both APIs.

Each program runs on the sharded model and on an unsharded copy. Both ranks have the same batch, so the mean of the
gradients over the ranks equals the gradient of the copy.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import sharded
from spec_tests.subject import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
    trace,
)

Optimizer = torch.optim.Optimizer


class Tiny(nn.Module):
    """Two inner units, and parameters of the root before and after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, *self.blocks):
            x = torch.tanh(block(x))
        result: Tensor = self.head(x)
        return result

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self(x).detach()
        return x


def in_place(**options: Any) -> Callable[[Tiny], Any]:
    return lambda model: sharded(model, blocks=range(2), **options)


def around(strategy: str, *, keeps_originals: bool, **options: Any) -> Callable[[Tiny], Any]:
    def shard(model: Tiny) -> Any:
        options.update(sharding_strategy=ShardingStrategy[strategy], use_orig_params=keeps_originals)
        options["device_id"] = device()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FullyShardedDataParallel(block, **options)
        return FullyShardedDataParallel(model, **options)

    return shard


FREES = {
    "fully_shard": in_place(),
    "fully_shard True": in_place(reshard_after_forward=True),
    "FULL_SHARD": around("FULL_SHARD", keeps_originals=False),
    "FULL_SHARD originals": around("FULL_SHARD", keeps_originals=True),
    "NO_SHARD": around("NO_SHARD", keeps_originals=False),
    "NO_SHARD originals": around("NO_SHARD", keeps_originals=True),
}
KEEPS = {
    "fully_shard False": in_place(reshard_after_forward=False),
    "SHARD_GRAD_OP": around("SHARD_GRAD_OP", keeps_originals=False),
    "SHARD_GRAD_OP originals": around("SHARD_GRAD_OP", keeps_originals=True),
}
ALL = FREES | KEEPS
every_kind = pytest.mark.parametrize("kind", ALL)
NO_GRADIENTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
NOT_SIMULATED = pytest.mark.not_simulated("it cannot view a part of a flat tensor in inference mode")
EVALUATIONS = [
    pytest.param(kind, mode, marks=[NOT_SIMULATED] if mode == "inference_mode" and "SHARD" in kind else [])
    for kind in ALL
    for mode in NO_GRADIENTS
]


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8).to(device())


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def evaluate(model: nn.Module, without: Callable[[], AbstractContextManager[Any]] = torch.no_grad) -> Tensor:
    with without():
        result: Tensor = model(batch())
    return result.clone()


def backward(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


def assert_shows_shards(model: nn.Module, owned: list[nn.Parameter]) -> None:
    shown = list(model.parameters())
    assert len(shown) == len(owned)
    assert all(parameter is expected for parameter, expected in zip(shown, owned, strict=True))


@pytest.mark.spec("FRESH-01")
@pytest.mark.parametrize(("kind", "mode"), EVALUATIONS)
@ranks(2)
def test_after_an_evaluation_the_modules_show_sharded_parameters(kind: str, mode: str) -> None:
    model = ALL[kind](Tiny())
    owned = list(model.parameters())
    for place in range(3):
        evaluate(model, NO_GRADIENTS[mode])
        assert_shows_shards(model, owned)
        if place == 1:
            model(batch())
            evaluate(model, NO_GRADIENTS[mode])
            assert_shows_shards(model, owned)
        backward(model)
        evaluate(model, NO_GRADIENTS[mode])
        assert_shows_shards(model, owned)
        # An original parameter without elements on this rank has no gradient.
        assert all(parameter.grad is not None for parameter in owned if parameter.numel())
        model.zero_grad()


@pytest.mark.spec("FRESH-01")
@every_kind
@ranks(2)
def test_modules_show_shards_after_a_forward_without_requires_grad(kind: str) -> None:
    model = ALL[kind](Tiny().requires_grad_(False))
    owned = list(model.parameters())
    for _ in range(2):
        assert torch.allclose(model(batch()), Tiny().to(device())(batch()), atol=1e-6)
        assert_shows_shards(model, owned)
        with torch.no_grad():
            for parameter in owned:
                parameter.data.add_(0)


@pytest.mark.spec("FRESH-01")
@pytest.mark.parametrize("keeps", [None, False])
@pytest.mark.parametrize("records", [False, True])
@ranks(2)
def test_after_a_registered_method_the_module_shows_sharded_parameters(keeps: bool | None, records: bool) -> None:
    plain = Tiny().to(device())
    model = in_place(reshard_after_forward=keeps)(copy.deepcopy(plain))
    owned = list(model.parameters())
    register_fsdp_forward_method(model, "generate")
    for _ in range(2):
        with torch.set_grad_enabled(records):
            expected = plain.generate(batch())
            assert torch.allclose(model.generate(batch()), expected, atol=1e-6)
        if keeps is None:
            assert_shows_shards(model, owned)
        else:
            # The blocks can stay unsharded, because a backward through the method's results is possible.
            assert all(isinstance(parameter, DTensor) for parameter in model.head.parameters())
        for one in (model, plain):
            optimizer = sgd(one)
            backward(one)
            optimizer.step()
            optimizer.zero_grad()
            if keeps is None:
                for parameter in one.parameters():
                    parameter.data.mul_(0.5)


@pytest.mark.spec("FRESH-01")
@ranks(2)
def test_a_loss_that_is_not_in_the_output_still_has_its_backward() -> None:
    class Sideways(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            self.loss = super().forward(x).square().mean()
            return self.loss.detach()

    plain = Sideways().to(device())
    model = in_place()(copy.deepcopy(plain))
    owned = list(model.parameters())
    for one in (model, plain):
        one(batch())
    assert_shows_shards(model, owned)
    for one in (model, plain):
        one.loss.backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad.full_tensor(), expected.grad, atol=1e-6)


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
KEEPS_ROOT = [kind for kind in ALL if "NO_SHARD" not in kind and kind != "fully_shard True"]
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
@every_kind
@ranks(2)
def test_changes_of_params_after_evaluation_persist(kind: str, place: str) -> None:
    for name, edit in EDITS.items():
        if name in WITHOUT_A_TRACE and kind in KEEPS_ROOT:
            # Parameters that stay unsharded are not all-gathered again. torch does the same. See the next tests.
            continue
        plain = Tiny().to(device())
        model = ALL[kind](copy.deepcopy(plain))
        for got, expected in zip(run(model, place, edit), run(plain, place, edit), strict=True):
            assert torch.allclose(got, expected, atol=1e-5), name


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("name", ["scaled", *WITHOUT_A_TRACE])
@pytest.mark.parametrize("kind", FREES)
@ranks(2)
def test_evaluation_after_an_evaluation_uses_every_kind_of_change(kind: str, name: str) -> None:
    plain = Tiny().to(device())
    model = FREES[kind](copy.deepcopy(plain))
    is_limited = name in WITHOUT_A_TRACE and kind in KEEPS_ROOT
    for _ in range(2):
        for one in (model, plain):
            evaluate(one)
            EDITS[name](one.blocks if is_limited else one)
        assert torch.allclose(evaluate(model), evaluate(plain), atol=1e-6)


@pytest.mark.spec("FRESH-03")
@pytest.mark.parametrize("name", WITHOUT_A_TRACE)
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("kind", KEEPS_ROOT)
@ranks(2)
def test_a_change_that_is_not_counted_is_used_after_a_reshard_or_a_backward(
    kind: str, reshards: bool, name: str
) -> None:
    plain = Tiny().to(device())
    model = ALL[kind](copy.deepcopy(plain))
    for one in (model, plain):
        evaluate(one)
        EDITS[name](one)
    if reshards and "fully_shard" in kind:
        for unit in (model, *model.blocks):
            unit.reshard()
    else:
        backward(model)
    assert torch.allclose(evaluate(model), evaluate(plain), atol=1e-6)


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("keeps", [None, True, False])
@ranks(2)
def test_submodule_is_converted_partly_frozen_and_tied_after_an_evaluation(keeps: bool | None) -> None:
    plain = Tiny().to(device())
    model = in_place(reshard_after_forward=keeps)(copy.deepcopy(plain))
    x, results = batch(), list[Tensor]()
    for one in (model, plain):
        with torch.no_grad():
            one(x)
        one.head.to(torch.float64)
        one.to(torch.float64)
        with torch.no_grad():
            one(x.double())
        one.head.weight = one.first.weight
        one.first.bias.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        one(x.double()).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            results.append(one(x.double()))
    assert torch.allclose(*results, atol=1e-5)


@pytest.mark.spec("FRESH-02")
@pytest.mark.parametrize("kind", ["fully_shard", "fully_shard False"])
@ranks(2)
def test_optimizer_state_is_saved_and_loaded_after_an_evaluation(kind: str) -> None:
    model = ALL[kind](Tiny())
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    expected = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    evaluate(model)
    saved = get_optimizer_state_dict(model, optimizer)
    assert saved["state"].keys() == expected["state"].keys()
    evaluate(model)
    other = torch.optim.Adam(model.parameters())
    set_optimizer_state_dict(model, other, saved)
    for parameter in model.parameters():
        mine, expected = (either.state[parameter]["exp_avg"].to_local() for either in (other, optimizer))
        assert torch.equal(mine, expected)


@pytest.mark.spec("FRESH-02")
@every_kind
@ranks(2)
def test_an_optimizer_in_backward_that_is_attached_after_an_evaluation_steps(kind: str) -> None:
    plain = Tiny().to(device())
    model = ALL[kind](copy.deepcopy(plain))
    for one in (model, plain):
        evaluate(one)
        for parameter in one.parameters():
            alone = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda p, alone=alone: (alone.step(), alone.zero_grad())[0])
        for _ in range(2):
            backward(one)
    assert torch.allclose(evaluate(model), evaluate(plain), atol=1e-5)


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


@pytest.mark.spec("FRESH-01", "NEW-05")
@ranks(4)
def test_after_an_evaluation_before_a_backward_modules_have_the_parameters_of_the_full_mesh() -> None:
    model = in_place(reshard_after_forward=2)(Tiny().to(device()))
    parameters = list(model.parameters())
    loss = model(batch()).sum()
    evaluate(model)
    assert all(map(operator.is_, model.parameters(), parameters))
    loss.backward()


@pytest.mark.spec("SHARD-14")
@ranks(2)
def test_an_evaluation_before_a_backward_frees_all_units_except_the_root() -> None:
    model = FREES["FULL_SHARD"](Tiny())
    loss = model(batch()).sum()
    with trace.record() as recorder:
        evaluate(model)
    assert recorder.count("FREE") == 2
    loss.backward()
