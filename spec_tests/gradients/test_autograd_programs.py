"""Programs that use autograd beyond ``loss.backward()``, with both APIs and all strategies.

Each program runs on the sharded model and on a plain copy. All ranks have the same batch, so the mean of the gradients
over the ranks is the gradient of the plain copy. After two steps, the parameters of both must be equal.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from spec_tests.gradients.autograd_models import (
    Forces,
    ForcesInEvaluation,
    ForcesWithoutGraph,
    GivesDict,
    GivesSparse,
    GivesView,
    GivesWeight,
    InPlace,
    IntoDict,
    IntoInput,
    IntoList,
    KeepsEachRun,
    ListsPenalty,
    ListsPenaltyOfTwoOutputs,
    Net,
    OneDict,
    OneList,
    OnlyKeeps,
    ReadsSparse,
    ReadsWeights,
    Recomputed,
    RunsTwice,
    SumsPenalties,
    UsesInputAgain,
    blocks_of,
    layouts,
    original,
    units_of,
)
from spec_tests.harness import device, ranks
from spec_tests.models.kinds import shard
from spec_tests.models.values import full_values
from spec_tests.subject import FullyShardedDataParallel


def plain(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).mean().backward()


def read(model: nn.Module, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain(model, x)


def evaluated_first(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert model(x).isfinite().all()
    plain(model, x)


def requested(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    model(x).pow(2).mean().backward(inputs=parameters)


def requested_of_dict(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    model(x)["result"].pow(2).mean().backward(inputs=parameters)


def requested_with_input(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    parameters = list(model.parameters())
    model(x).pow(2).mean().backward(inputs=[x, *parameters])
    assert x.grad is not None


def requested_input_first(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    model(x).pow(2).mean().backward(inputs=[x])
    assert all(parameter.grad is None for parameter in model.parameters())
    plain(model, x.detach())


def forces(model: nn.Module, x: Tensor) -> None:
    energy, force = model(x)
    (energy**2 + force.pow(2).sum()).backward()


def evaluated_forces(model: nn.Module, x: Tensor) -> None:
    # The second evaluation follows an optimizer step.
    with torch.no_grad():
        model(x)
    forces(model, x)


def penalty(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((gradient.norm(dim=1) - 1) ** 2).mean().backward()


def penalty_among_forwards(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (((gradient.norm(dim=1) - 1) ** 2).mean() + model(2 * x).mean() - model(x).mean()).backward()


def products(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
    for _ in range(2):
        torch.autograd.grad(gradient, x, torch.ones_like(gradient), retain_graph=True)
    (output.mean() + gradient.pow(2).mean()).backward()


def output_gradients(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    output = model(x)
    ones = torch.ones_like(output, requires_grad=True)
    (gradient,) = torch.autograd.grad(output, x, ones, create_graph=True)
    (tangent,) = torch.autograd.grad(gradient, ones, torch.ones_like(gradient), create_graph=True)
    tangent.pow(2).sum().backward()


def kept(model: nn.Module, x: Tensor) -> None:
    model(x)
    torch.stack([block.kept["losses"][0] for block in blocks_of(model)]).sum().backward()


def kept_of_all_runs(model: nn.Module, x: Tensor) -> None:
    for block in blocks_of(model):
        block._runs = []
    model(x)
    torch.stack([loss for block in blocks_of(model) for loss in block._runs]).sum().backward()


def hooked_in_turn(model: nn.Module, x: Tensor) -> None:
    """Observes one module of each block, and another one in the next iteration."""
    for name in ("first", "router"):
        seen: list[Tensor] = []
        hooks = [
            getattr(block, name).register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.tanh()))
            for block in blocks_of(model)
        ]
        model(x)
        for hook in hooks:
            hook.remove()
        torch.stack(seen).pow(2).mean().backward()


def hooked(model: nn.Module, x: Tensor) -> None:
    seen: list[Tensor] = []
    hooks = [
        block.first.register_forward_hook(lambda _, __, out: seen.append(out.tanh())) for block in blocks_of(model)
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    torch.stack(seen).pow(2).mean().backward()


def tangents(model: nn.Module, x: Tensor) -> None:
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")  # PyTorch's own, when it loads decompositions.
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert tangent is not None
        tangent.pow(2).mean().backward()


def trained(model: nn.Module, program: Callable[..., None]) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 8).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        program(model, x)
        optimizer.step()
    return list(full_values(model).values())


def check_equal_to_plain(program: Callable[..., None], make: Callable[[], Net]) -> None:
    model = make()
    expected = trained(copy.deepcopy(model).to(device()), program)
    for name, sharded in layouts(model):
        for value, right in zip(trained(sharded, program), expected, strict=True):
            torch.testing.assert_close(
                value, right, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


CASES: dict[str, tuple[Callable[..., None], Callable[[], Net]]] = {
    ("PROG-20", "parameters"): (requested, Net),
    ("PROG-20", "parameters, a dict"): (requested_of_dict, GivesDict),
    ("PROG-20", "parameters and an input"): (requested_with_input, Net),
    ("PROG-20", "an input"): (requested_input_first, Net),
    ("PROG-23", "forces"): (forces, Forces),
    ("PROG-23", "forces without a graph"): (forces, ForcesWithoutGraph),
    ("PROG-23", "forces in an evaluation"): (evaluated_forces, ForcesInEvaluation),
    ("PROG-24", "penalty"): (penalty, Net),
    ("PROG-24", "penalty among forwards"): (penalty_among_forwards, Net),
    ("PROG-24", "penalty of recomputed blocks"): (penalty, Recomputed),
    ("PROG-24", "products"): (products, Net),
    ("PROG-24", "output gradients"): (output_gradients, Net),
    ("PROG-27", "attributes"): (kept, Net),
    ("PROG-27", "the only result of a unit"): (kept, lambda: Net(OnlyKeeps)),
    ("PROG-27", "one run of a unit"): (kept_of_all_runs, lambda: Net(KeepsEachRun)),
    ("PROG-27", "two runs of a unit"): (kept_of_all_runs, lambda: RunsTwice(KeepsEachRun)),
    ("PROG-28", "hooks"): (hooked, Net),
    ("PROG-28", "hooks in turn"): (hooked_in_turn, Net),
    ("PROG-29", "list"): (plain, lambda: OneList(IntoList)),
    ("PROG-29", "dict"): (plain, lambda: OneDict(IntoDict)),
    ("PROG-29", "list beside an output"): (plain, lambda: SumsPenalties(ListsPenalty)),
    ("PROG-29", "list beside two outputs"): (plain, lambda: SumsPenalties(ListsPenaltyOfTwoOutputs)),
    ("PROG-29", "input"): (plain, lambda: UsesInputAgain(IntoInput)),
    ("PROG-30", "in place"): (plain, lambda: UsesInputAgain(InPlace)),
    ("PROG-31", "tangents"): (tangents, Net),
    ("PROG-32", "view"): (read, lambda: ReadsWeights(GivesView)),
    ("PROG-32", "weight"): (read, lambda: ReadsWeights(GivesWeight)),
    ("PROG-32", "evaluation"): (evaluated_first, lambda: ReadsWeights(GivesView)),
    ("PROG-80", "sparse"): (plain, lambda: ReadsSparse(GivesSparse)),
}


# Tensors of the simulated device are of a class of their own.
NO_VIEWS = "the package inspects the memory of plain tensors only"
NO_TANGENTS = "forward-mode differentiation reads the memory of its tensors"
NOT_SIMULATED = {"PROG-31": [pytest.mark.not_simulated(NO_TANGENTS)], "PROG-32": [pytest.mark.not_simulated(NO_VIEWS)]}


# Programs that need the node at the output of the root, in addition to their own requirement.
REQUESTS = {("PROG-25", "requested"), ("PROG-99", "hidden")}


def params_of(cases: Iterable[tuple[str, str]]) -> list[Any]:
    """Each case, marked with its requirement."""
    marks = {
        case: [
            pytest.mark.spec(*([case[0], "PROG-20"] if case in REQUESTS else [case[0]])),
            *NOT_SIMULATED.get(case[0], []),
        ]
        for case in cases
    }
    return [pytest.param(case, marks=marks[case], id=" ".join(case)) for case in cases]


@pytest.mark.parametrize("case", params_of(CASES))
@ranks(2)
def test_program_trains_as_the_plain_model(case: tuple[str, str]) -> None:
    check_equal_to_plain(*CASES[case])


def parts_of_a_unit(model: nn.Module, x: Tensor) -> None:
    model(x).mean().backward(inputs=list(model.parameters())[:1])


def gradients_of_parameters(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    torch.autograd.grad(model(x).mean(), parameters, allow_unused=True)


def graph_of_gradients(model: nn.Module, x: Tensor) -> None:
    model(x).pow(2).mean().backward(create_graph=True)


def graph_of_requested_gradients(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    model(x).pow(2).mean().backward(create_graph=True, inputs=parameters)


def requested_of_hidden(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    handle = original(model).register_forward_hook(lambda _, __, output: (output, output.mean()), prepend=True)
    output, mean = model(x)
    handle.remove()
    (output.pow(2).mean() + mean).backward(inputs=parameters)


def step_before_backward(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain(model, x)
    loss = model(x).pow(2).mean()
    optimizer.step()
    loss.backward()


def average_before_backward(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    loss = model(x).pow(2).mean()
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.9)
    loss.backward()


def transform(model: nn.Module, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, when it loads decompositions.
        torch.func.jvp(lambda v: model(v), (x,), (torch.ones_like(x),))


REFUSED: dict[str, tuple[Callable[..., None], str]] = {
    ("PROG-22", "one"): (gradients_of_parameters, "autograd-grad"),
    ("PROG-25", "one"): (graph_of_gradients, "graph-of-gradients"),
    ("PROG-25", "requested"): (graph_of_requested_gradients, "graph-of-gradients"),
    ("PROG-99", "hidden"): (requested_of_hidden, "requested-of-outputs"),
    ("PROG-26", "step"): (step_before_backward, "changed-since-forward"),
    ("PROG-26", "average"): (average_before_backward, "changed-since-forward"),
    ("PROG-31", "one"): (transform, "function-transform"),
}


def states_of(model: Any) -> set[str]:
    """The states of all units."""
    return {unit.state.name for unit in model._root_state.iteration.units}


def wrapped(model: Net) -> FullyShardedDataParallel:
    """Each block is a unit."""
    sharded: FullyShardedDataParallel = shard("flat FULL_SHARD", model, units_of(model))
    return sharded


def check_refused(program: Callable[..., None], entry: str) -> None:
    x = torch.ones(4, 8).to(device())
    for name, model in layouts(Net()):
        with pytest.raises(RuntimeError, match=f"#E-{entry}"):
            program(model, x)
        # The next iteration works.
        model.zero_grad()
        plain(model, x)
        assert any(parameter.grad is not None for parameter in model.parameters()), name


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.spec(c[0]), id=" ".join(c)) for c in REFUSED])
@ranks(2)
def test_program_is_refused_by_name(case: tuple[str, str]) -> None:
    check_refused(*REFUSED[case])


@pytest.mark.spec("PROG-21")
@ranks(2)
def test_part_of_a_unit_is_refused() -> None:
    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=device())
    with pytest.raises(RuntimeError, match="#E-part-of-unit"):
        parts_of_a_unit(model, torch.ones(4, 8).to(device()))


@pytest.mark.spec("PROG-26")
@ranks(2)
def test_summoned_parameters_without_a_change_are_not_refused() -> None:
    model = wrapped(Net())
    loss = model(torch.ones(4, 8).to(device())).mean()
    with FullyShardedDataParallel.summon_full_params(model):
        pass
    loss.backward()


@pytest.mark.spec("PROG-24")
@pytest.mark.parametrize("is_used", [True, False])
@ranks(2)
def test_units_are_resharded_when_the_graph_of_gradients_is_no_longer_needed(is_used: bool) -> None:
    model = wrapped(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 8).to(device()).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert states_of(model) == {"UNSHARDED"}
    if is_used:
        gradient.pow(2).sum().backward()
    else:
        # The first evaluation after a step reshards them.
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with torch.no_grad():
            model(x)
    # The root is kept for the next evaluation (FRESH-03).
    resharded = [unit for unit in model._root_state.iteration.units if is_used or unit.policy.reshard_after_forward]
    assert resharded
    assert {unit.state.name for unit in resharded} == {"SHARDED"}


@pytest.mark.not_simulated(NO_VIEWS)
@pytest.mark.spec("PROG-32")
@ranks(2)
def test_unit_that_returns_a_view_warns_once_and_is_resharded_after_its_backward() -> None:
    model = wrapped(ReadsWeights(GivesView))
    x = torch.ones(4, 8).to(device())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model(x).mean()
            assert states_of(model) == {"UNSHARDED"}
            loss.backward()
            assert states_of(model) == {"SHARDED"}
    found = [str(warning.message) for warning in caught if "E-returns-parameters" in str(warning.message)]
    assert [text.split("'")[1] for text in found] == ["blocks.0", "blocks.1"]
