"""Programs that use autograd beyond ``loss.backward()``, with both APIs and all strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from spec_tests.cases.programs import Block, Net, assert_trains_alike, batch, sharded
from spec_tests.harness import ranks

# Flat and original parameters, with and without shards, and the other API.
some_kinds = pytest.mark.parametrize("kind", ["flat FULL_SHARD", "original NO_SHARD", "fully_shard True"])

# --- second derivatives ---


class Recomputed(Net):
    """Computes its blocks again in backward, together."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=False)))


def gradient_penalty(model: Any, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    # Two later forwards.
    (((gradient.norm(dim=1) - 1) ** 2).mean() + model(2 * x).mean() - model(x).mean()).backward()


def hessian_vector_products_before_a_backward(model: Any, x: Tensor) -> None:
    output = model(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    for _ in range(2):
        torch.autograd.grad(gradient, x, torch.ones_like(gradient), retain_graph=True)
    (output.mean() + gradient.square().mean()).backward()


def gradient_of_the_gradient_of_an_output(model: Any, x: Tensor) -> None:
    output = model(x)
    ones = torch.ones_like(output, requires_grad=True)
    (gradient,) = torch.autograd.grad(output, x, ones, create_graph=True)
    (tangent,) = torch.autograd.grad(gradient, ones, torch.ones_like(gradient), create_graph=True)
    tangent.square().sum().backward()


@pytest.mark.spec("PROG-24")
@pytest.mark.parametrize(
    ("build", "program"),
    [
        (Net, gradient_penalty),
        (Recomputed, gradient_penalty),
        (Net, hessian_vector_products_before_a_backward),
        (Net, gradient_of_the_gradient_of_an_output),
    ],
)
@some_kinds
@ranks(2)
def test_a_program_with_second_derivatives_trains(kind: str, build: Callable[[], Net], program: Any) -> None:
    assert_trains_alike(kind, build(), lambda model, x: program(model, x.clone().requires_grad_()))


@pytest.mark.spec("PROG-24")
@pytest.mark.parametrize("is_used", [True, False])
@ranks(2)
def test_units_are_resharded_when_the_graph_of_gradients_is_no_longer_needed(is_used: bool) -> None:
    model = sharded("flat FULL_SHARD", Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    units = model._root_state.iteration.units
    assert {unit.state.name for unit in units} == {"UNSHARDED"}
    if is_used:
        gradient.square().sum().backward()
    else:
        # The first evaluation after a step reshards them. The root is kept for the next evaluation (FRESH-03).
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with torch.no_grad():
            model(x)
        units = [unit for unit in units if unit.policy.reshard_after_forward]
    assert [unit.state.name for unit in units] == ["SHARDED"] * (3 if is_used else 2)


# --- function transforms ---


@pytest.mark.spec("PROG-31")
@pytest.mark.not_simulated("forward-mode differentiation reads the memory of its tensors")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@some_kinds
@ranks(2)
def test_a_loss_of_forward_mode_tangents_trains(kind: str) -> None:
    def program(model: Any, x: Tensor) -> None:
        with forward_ad.dual_level():
            output = model(forward_ad.make_dual(x, torch.ones_like(x)))
            forward_ad.unpack_dual(output).tangent.square().mean().backward()

    assert_trains_alike(kind, Net(), program)


@pytest.mark.spec("PROG-31")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@some_kinds
@ranks(2)
def test_a_forward_inside_a_function_transform_is_refused(kind: str) -> None:
    model, x = sharded(kind, Net()), batch()
    with pytest.raises(RuntimeError, match="#E-function-transform"):
        torch.func.jvp(model, (x,), (torch.ones_like(x),))
    model(x).sum().backward()


@pytest.mark.spec("PROG-103", "PROG-55")
@pytest.mark.parametrize("program", ["nested", "beside", "input"])
@some_kinds
@ranks(2)
def test_a_model_inside_vmap_trains(kind: str, program: str) -> None:
    def run(model: Any, x: Tensor) -> None:
        x = x.clone().requires_grad_(program == "input")
        if program == "nested":
            output = torch.vmap(torch.vmap(model))(x.expand(2, 4, 8))
        else:
            output = torch.vmap(model)(x)
        loss = output.square().sum()
        if program == "beside":
            loss = loss + model(x).sum()
        loss.backward()
        assert (x.grad is not None) == (program == "input")

    assert_trains_alike(kind, Net(), run)


@pytest.mark.spec("PROG-103")
@some_kinds
@ranks(2)
def test_a_unit_inside_vmap_trains(kind: str) -> None:
    class Maps(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.vmap(self.blocks[1])(self.blocks[0](x)))

    assert_trains_alike(kind, Maps(), lambda model, x: model(x).square().sum().backward())


# --- hooks of parameters, and kept outputs ---


@pytest.mark.spec("PROG-101")
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@some_kinds
@ranks(2)
def test_requested_gradients_of_parameters_with_hooks_are_computed(kind: str, method: str) -> None:
    calls: list[Tensor] = []

    def program(model: Any, x: Tensor) -> None:
        parameters = list(model.parameters())
        handles = [getattr(parameter, method)(lambda value: calls.append(value)) for parameter in parameters]
        model(x).square().sum().backward(inputs=parameters)
        for handle in handles:
            handle.remove()

    assert_trains_alike(kind, Net(), program)
    assert calls
    assert all(isinstance(value, Tensor) for value in calls)


@pytest.mark.spec("PROG-101")
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("is_late", [False, True])
@some_kinds
@ranks(2)
def test_a_hook_of_several_parameters_is_called_once_in_each_backward(kind: str, mode: Any, is_late: bool) -> None:
    model, calls = sharded(kind, Net()), list[Any]()
    output = model(batch()) if is_late else None
    parameters = list(model.parameters())
    register_multi_grad_hook(parameters, calls.append, mode=mode)
    for count in (1, 2):
        if output is None:
            output = model(batch())
        output.square().sum().backward()
        output = None
        assert len(calls) == count
    if mode == "all":
        assert [len(gradients) for gradients in calls] == [len(parameters)] * 2
        assert all(isinstance(gradient, Tensor) for gradients in calls for gradient in gradients)


@pytest.mark.spec("PROG-104")
@pytest.mark.parametrize("use_reentrant", [True, False])
@some_kinds
@ranks(2)
def test_a_unit_that_keeps_its_output_trains_inside_a_checkpoint(kind: str, use_reentrant: bool) -> None:
    class Keeps(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            return self.head(torch.tanh(checkpoint(self.blocks[1], x, use_reentrant=use_reentrant)))

    assert_trains_alike(kind, Checkpointed(Keeps), lambda model, x: model(x).square().sum().backward())
