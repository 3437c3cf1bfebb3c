"""No forward uses weights from before an optimizer step, and only steps of the model's own optimizers count."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from spec_tests.harness import device, ranks
from spec_tests.harness.programs import output_of_ranks
from spec_tests.models.kinds import KINDS as ALL_KINDS
from spec_tests.models.kinds import shard
from spec_tests.models.running import Wire
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, fully_shard

Parameters = Iterable[nn.Parameter]


class OwnStep(torch.optim.SGD):
    """An optimizer with its own `step`, which uses a list operator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.5)


class NoOptimizer:
    """A manual update, not derived from PyTorch's optimizer class."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.5)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


OPTIMIZERS: dict[str, Callable[[Parameters], Any]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.5, foreach=False),
    "SGD foreach": lambda ps: torch.optim.SGD(ps, 0.5, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "own step": lambda ps: OwnStep(ps, 0.5),
    "no optimizer": NoOptimizer,
}


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device())


def kept_after_backward(model: nn.Sequential) -> Any:
    shard("fully_shard False", model, ["0"])
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    return model


KINDS: dict[str, Callable[[nn.Sequential], Any]] = {
    **{kind: functools.partial(shard, kind, units=["0"]) for kind in ALL_KINDS},
    "kept after backward": kept_after_backward,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8).to(device())


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(batch())
    return result.clone()


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(batch()).square().mean()
    loss.backward()
    return loss


# Changes between a backward and the step of the optimizer.
BETWEEN: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "evaluation": evaluate,
    "recorded forward": lambda model: model(batch()),
}


@pytest.mark.spec("FRESH-04")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("between", BETWEEN)
@every_kind
@ranks(2)
def test_a_forward_after_a_step_uses_the_new_weights(kind: str, between: str, optimizer: str) -> None:
    plain = tiny()
    model = KINDS[kind](copy.deepcopy(plain))
    optimizers = [OPTIMIZERS[optimizer](one.parameters()) for one in (model, plain)]
    for _ in range(2):
        for one, of_one in zip((model, plain), optimizers, strict=True):
            backward(one)
            BETWEEN[between](one)
            of_one.step()
        torch.testing.assert_close(evaluate(model), evaluate(plain))
        torch.testing.assert_close(model(batch()), plain(batch()))
        for of_one in optimizers:
            of_one.zero_grad()


@pytest.mark.spec("FRESH-04")
@every_kind
@ranks(2)
def test_a_forward_after_a_step_with_a_closure_uses_the_new_weights(kind: str) -> None:
    plain = tiny()
    model = KINDS[kind](copy.deepcopy(plain))
    for one in (model, plain):
        OPTIMIZERS["SGD foreach"](one.parameters()).step(functools.partial(backward, one))
    torch.testing.assert_close(evaluate(model), evaluate(plain))


@pytest.mark.spec("FRESH-04")
@every_kind
@ranks(2)
def test_an_optimizer_in_backward_is_noticed(kind: str) -> None:
    plain = tiny()
    model = KINDS[kind](copy.deepcopy(plain))
    for one in (model, plain):
        for parameter in one.parameters():
            alone = torch.optim.AdamW([parameter], lr=0.1, fused=True)
            parameter.register_post_accumulate_grad_hook(lambda p, alone=alone: (alone.step(), alone.zero_grad())[0])
    for _ in range(2):
        for one in (model, plain):
            one(batch())
            backward(one)
        assert torch.allclose(evaluate(model), evaluate(plain), atol=1e-4)


@pytest.mark.spec("FRESH-04")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "SHARD" in kind])
@ranks(2)
def test_parameters_that_are_set_from_a_vector_are_noticed(kind: str) -> None:
    model = KINDS[kind](tiny())
    model(batch())
    parameters = [parameter for parameter in model.parameters() if parameter.is_leaf and parameter.numel()]
    if kind == "original SHARD_GRAD_OP":
        # With this strategy, modules have unsharded parameters between a forward and its backward.
        evaluate(model)
        parameters = [parameter for parameter in model.parameters() if parameter.numel()]
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(torch.zeros_like(vector), parameters)
    assert torch.count_nonzero(evaluate(model)) == 0


@pytest.mark.spec("FRESH-04")
@ranks(2)
def test_rank_with_optimizer_without_empty_params_all_gathers() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True}
    inner = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=device(), **options)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(8, 1), inner), device_id=device(), **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.numel()], lr=0.1, fused=True)
    backward(model)
    before = evaluate(model)
    optimizer.step()
    assert not torch.equal(evaluate(model), before)


@pytest.mark.spec("FRESH-04")
@ranks(2)
def test_a_step_after_unshard_is_noticed_by_the_first_forward_of_a_larger_model() -> None:
    results = []
    for shards in (True, False):
        model = KINDS["fully_shard True"](tiny()) if shards else tiny()
        optimizer = OPTIMIZERS["AdamW fused"](model[0].parameters())
        backward(model[0])
        if shards:
            model[0].unshard()
        optimizer.step()
        results.append(evaluate(model))
    torch.testing.assert_close(*results)


# --- optimizer steps that count ---


@pytest.mark.spec("FRESH-06")
@every_kind
@ranks(2)
def test_optimizer_step_of_other_model_causes_no_all_gather(kind: str) -> None:
    model, other = KINDS[kind](tiny()), tiny()
    sharded_alone = FullyShardedDataParallel(
        tiny(), process_group=_group_of_each_rank(), device_id=device(), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    torch.optim.SGD(model.parameters(), 0.1)
    evaluate(model)
    if dist.get_rank() == 0:
        for one in (other, sharded_alone):
            optimizer = torch.optim.SGD(one.parameters(), 0.1)
            backward(one)
            optimizer.step()
    with Wire() as wire:
        evaluate(model)
    keeps = kind in ("fully_shard False", "kept after backward") or "NO_SHARD" in kind or "SHARD_GRAD_OP" in kind
    # The wrapper keeps the root.
    num_resharded = 2 if kind.startswith("fully_shard") else 1
    assert wire.calls().count("AG") == (0 if keeps else num_resharded)


def _group_of_each_rank() -> Any:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.spec("FRESH-06")
@pytest.mark.pure
def test_optimizer_hook_is_installed_with_the_first_unit_and_removed_with_the_last() -> None:
    script = Path(__file__).with_name("hooks_of_optimizers.py")
    stages = ["two models 1", "one model 1", "no model 0"]
    assert output_of_ranks(script, num_ranks=1, environment={}).splitlines() == ["before 0", *stages, *stages]


@pytest.mark.spec("FRESH-06")
@ranks(1)
def test_model_that_is_deleted_during_a_step_does_not_disturb_the_step() -> None:
    """PyTorch iterates over the hooks during a step."""
    plain = tiny()
    models = [KINDS["fully_shard True"](tiny())]
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)

    def forget(*_: Any) -> None:
        models.clear()
        gc.collect()

    handle = torch_optimizer.register_optimizer_step_pre_hook(forget)
    try:
        backward(plain)
        optimizer.step()
    finally:
        handle.remove()
    assert models == []


# --- local SGD ---


@pytest.mark.spec("FRESH-07", "NOSYNC-10")
@pytest.mark.parametrize("kind", ["flat NO_SHARD", "original NO_SHARD"])
@ranks(2)
def test_replicas_take_local_steps_and_the_program_averages_them(kind: str) -> None:
    plain = tiny()
    model = KINDS[kind](copy.deepcopy(plain))
    x = batch() * (1 + dist.get_rank())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    for _ in range(3):
        with model.no_sync():
            for one in (model, plain):
                one(x).square().mean().backward()
        model.clip_grad_norm_(0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter in (*model.parameters(), *plain.parameters()):
        dist.all_reduce(parameter.data)
        parameter.data /= 2
    torch.testing.assert_close(evaluate(model), evaluate(plain))
    # A later backward that reduces computes correct gradients.
    for one in (model, plain):
        one(x).square().mean().backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    ours, expected = (
        nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None]) for one in (model, plain)
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.spec("FRESH-04", "FRESH-06")
@every_kind
@ranks(2)
def test_a_step_counts_for_a_model_that_was_added_to_its_optimizer_later(kind: str) -> None:
    results = []
    for make in (KINDS[kind], lambda model: model):
        first, added = make(tiny()), make(tiny())
        optimizer = OPTIMIZERS["AdamW fused"](first.parameters())
        backward(first)
        optimizer.step()
        optimizer.add_param_group({"params": list(added.parameters())})
        backward(added)
        evaluate(added)
        optimizer.step()
        results.append(evaluate(added))
    torch.testing.assert_close(*results)


@pytest.mark.spec("FRESH-04")
@ranks(2)
def test_a_step_before_the_first_forward_with_replaced_parameters_hides_no_later_step() -> None:
    with torch.device("meta"):
        model: Any = fully_shard(nn.Linear(4, 4))
    values = {name: torch.ones_like(value, device=device()) for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    parameters: list[Any] = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.5, fused=True)
    # As torch's `get_optimizer_state_dict` does, to create the state.
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    model.set_reshard_after_backward(False)
    x = torch.ones(1, 4, device=device())
    model(x).sum().backward()
    optimizer.step()
    weight, bias = (parameter.full_tensor() for parameter in parameters)
    torch.testing.assert_close(model(x), x @ weight.T + bias)
