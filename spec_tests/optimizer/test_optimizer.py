"""torch's optimizers and its gradient clipping on sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from spec_tests.harness import ranks
from spec_tests.models import sharding, values
from spec_tests.models.gradients import step_with
from spec_tests.models.modules import seeded
from spec_tests.models.running import iterate

sharded = sharding.sharded


def with_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Only matrices have a weight decay."""
    parameters = list(parameters)
    matrices = {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.5}
    return torch.optim.AdamW([matrices, {"params": [p for p in parameters if p.ndim == 1]}], lr=0.01, weight_decay=0.0)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "Adam, one by one": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "AdamW with two groups": with_groups,
}


@pytest.mark.spec("FS2-OPT-01")
@ranks(2)
def test_optimizer_from_before_sharding_changes_nothing_and_a_new_one_works() -> None:
    model = seeded()
    stale = torch.optim.SGD(model.parameters(), lr=1.0)
    sharded(model)
    before = values.full_values(model)
    iterate(model)
    with pytest.warns(UserWarning, match="parameters of this SGD were replaced when the model was sharded"):
        stale.step()
    values.assert_same(values.full_values(model), before)
    fresh = torch.optim.SGD(model.parameters(), lr=1.0)
    fresh.step()
    assert not torch.equal(values.full_values(model)["enter.weight"], before["enter.weight"])


@pytest.mark.spec("FS2-OPT-05")
@pytest.mark.parametrize("assign", [False, True])
@ranks(2)
def test_gradient_has_the_same_spec_object_as_its_parameter(assign: bool) -> None:
    model = sharded()
    if assign:
        states = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(states, assign=True)
    iterate(model)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad._spec is parameter._spec


@pytest.mark.spec("FS2-OPT-04")
@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2)
def test_optimizers_of_torch_step_like_on_the_plain_model(name: str) -> None:
    model, plain = sharded(), seeded()
    optimizer, other = (OPTIMIZERS[name](each.parameters()) for each in (model, plain))
    for step in range(3):
        iterate(model, step, optimizer)
        step_with(values.mean_gradients(plain, (step,)), plain, other)
    values.assert_same(values.full_values(model), values.named(plain), bitwise="fused" not in name)


# --- clipping ---


@pytest.mark.spec("FS2-OPT-02", "FS2-OPT-03", "FS2-OPT-04", "MIG-19")
@pytest.mark.parametrize(
    ("is_grid", "norm_type"),
    # With four shards, one shard of a parameter is empty, and torch computes no infinity norm of it.
    [(False, 1.0), (False, 2.0), (False, 3.0), (True, 2.0), (True, float("inf"))],
)
@ranks(4)
def test_several_steps_of_adam_with_clipping_equal_one_process(is_grid: bool, norm_type: float) -> None:
    model, plain = sharded(mesh=sharding.grid_mesh() if is_grid else None), seeded()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain)]
    for step in range(3):
        iterate(model, step)
        for name, gradient in values.mean_gradients(plain, (step,)).items():
            plain.get_parameter(name).grad = gradient
        ours, expected = (nn.utils.clip_grad_norm_(each.parameters(), 0.05, norm_type) for each in (model, plain))
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), expected)
        clipped = {name: parameter.grad for name, parameter in plain.named_parameters()}
        values.assert_same(values.full_gradients(model), clipped, bitwise=False)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Adam divides by the size of a gradient, so a step can amplify its rounding.
    torch.testing.assert_close(values.full_values(model), values.named(plain), rtol=1e-4, atol=1e-5)
    for parameter, state in optimizers[0].state.items():
        assert state["exp_avg"].placements == state["exp_avg_sq"].placements == parameter.placements
        assert state["exp_avg"].to_local().shape == parameter.to_local().shape
        assert type(state["step"]) is Tensor


@pytest.mark.spec("FS2-OPT-03")
@ranks(2)
def test_clipping_sends_nothing_but_norms() -> None:
    model = sharded()
    iterate(model)
    with CommDebugMode() as communication:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norm.full_tensor()
    # The norm is a sum over the shards. An all-gather would send gradients.
    sent = {str(operator).rpartition(".")[2] for operator in communication.get_comm_counts()}
    assert sent == {"all_reduce"}
