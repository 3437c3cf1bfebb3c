"""Gradients keep their own memory: the reduction changes no other tensor, and no other code changes its input."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import set_reduction_overlap
from spec_tests.harness import device, ranks
from spec_tests.models import apis
from spec_tests.models.kinds import shard
from spec_tests.models.running import iterate
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy

STRATEGIES = FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = [*ShardingStrategy][:3]


class Add(nn.Module):
    """Adds a parameter to its input, so autograd passes the same gradient tensor to both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Model(nn.Module):
    """A layer before the addition, and a product after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.add = nn.Linear(4, 4), Add()

    def forward(self, x: Tensor) -> Tensor:
        return self.add(self.before(x)) * x.detach()


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.full((4, 4), 1.0 + rank + 2 * number, device=device())


@pytest.mark.spec("GRAD-01")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_gradient_that_shares_memory_with_another_one_changes_neither(
    strategy: ShardingStrategy, num_micro_batches: int, dtype: torch.dtype
) -> None:
    plain = Model().to(device(), dtype)
    model = apis.ORIGINALS.shard(copy.deepcopy(plain), unit_classes=(nn.Linear, Add), strategy=strategy)
    for number in range(num_micro_batches):
        is_last = number == num_micro_batches - 1
        inputs = [batch(rank, number).to(dtype).requires_grad_() for rank in range(2)]
        # The mean over the ranks of the sum over the micro-batches.
        for x in inputs:
            (plain(x).sum() / 2).backward()
        mine = inputs[dist.get_rank()].detach().requires_grad_()
        with contextlib.nullcontext() if is_last else model.no_sync():
            model(mine).sum().backward()
        torch.testing.assert_close(mine.grad, 2 * inputs[dist.get_rank()].grad)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(apis.ORIGINALS.gradients(model), expected)


@pytest.mark.spec("GRAD-01")
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_communication_hook_that_divides_in_place_changes_no_other_gradient(strategy: ShardingStrategy) -> None:
    model = FSDP(Add(), sharding_strategy=strategy, device_id=device())

    def divide(state: None, whole: Tensor, local_shard: Tensor | None = None) -> None:
        whole.div_(2.0)
        dist.all_reduce(whole)
        if local_shard is not None:
            local_shard.copy_(whole.chunk(2)[dist.get_rank()])

    model.register_comm_hook(None, divide)
    x = batch(dist.get_rank()).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.spec("GRAD-01")
@ranks(2)
def test_a_gradient_that_a_hook_keeps_is_not_changed_by_the_reduction() -> None:
    model = FSDP(Add(), sharding_strategy=NO_SHARD, device_id=device())
    kept: list[Tensor] = []
    model.module._parameters["_flat_param"].register_hook(kept.append)  # type: ignore[union-attr]
    (model(batch(0)).sum() * (1.0 + dist.get_rank())).backward()
    assert torch.equal(kept[0], torch.full((16,), 1.0 + dist.get_rank(), device=device()))


class InPlace(torch.autograd.Function):
    """Identity in forward. Its backward writes to the gradient tensor in place, as some programs do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(100.0)


def by_a_function(x: Tensor) -> Tensor:
    return InPlace.apply(x)


def by_a_hook(x: Tensor) -> Tensor:
    copied = x.clone()
    copied.register_hook(lambda gradient: gradient.mul_(100.0))
    return copied


@pytest.mark.spec("GRAD-01")
@pytest.mark.parametrize("change", [by_a_function, by_a_hook])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("overlaps", [True, False])
@ranks(2)
def test_user_code_may_change_the_input_gradient_during_the_reduction_of_the_unit(
    change: Any, strategy: ShardingStrategy, dtype: torch.dtype, overlaps: bool
) -> None:
    # Large enough that on CPUs it is sent directly from its own memory.
    unit = Add()
    unit.weight = nn.Parameter(torch.ones(1024, 1024, dtype=dtype))
    model = FSDP(unit, sharding_strategy=strategy, device_id=device())
    if strategy is not NO_SHARD:
        set_reduction_overlap(model, overlaps)
    x = torch.ones(1024, 1024, dtype=dtype, device=device(), requires_grad=True)
    (model(change(x)) * (dist.get_rank() + 1)).sum().backward()
    assert x.grad is not None and x.grad.unique().tolist() == [100.0 * (dist.get_rank() + 1)]
    (parameter,) = model.parameters()
    assert parameter.grad is not None and parameter.grad.unique().tolist() == [1.5]


class AddView(Add):
    """Adds a view of a parameter, so autograd passes a view of the gradient to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.view(4, 4)


@pytest.mark.spec("GRAD-01")
@pytest.mark.parametrize("kind", ["flat FULL_SHARD", "original SHARD_GRAD_OP", "flat NO_SHARD", "fully_shard True"])
@ranks(2)
def test_gradient_of_an_input_shares_no_memory_with_that_of_the_output(kind: str) -> None:
    model = shard(kind, Add())
    x = torch.ones(4, 4, device=device(), requires_grad=True)
    given = torch.ones(4, 4, device=device())
    model(x).backward(given)
    # A program may reuse the memory of a gradient that it has passed to backward.
    given.zero_()
    assert x.grad is not None and x.grad.unique().tolist() == [1.0]


@pytest.mark.spec("GRAD-01")
@pytest.mark.parametrize("option", ["True", "False"])
@ranks(2)
def test_accumulation_without_reduction_does_not_change_gradients_of_inputs(option: str) -> None:
    model = shard(f"fully_shard {option}", AddView())
    model.set_requires_gradient_sync(False)
    inputs = [torch.ones(4, 4, device=device(), requires_grad=True) for _ in range(2)]
    for number, x in enumerate(inputs):
        model(x).backward(torch.full_like(x, 1.0 + number))
    assert [x.grad.unique().tolist() for x in inputs if x.grad is not None] == [[1.0], [2.0]]


@pytest.mark.spec("PROG-40", "NEW-24")
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_gradient_that_a_hook_has_expanded_is_reduced(strategy: ShardingStrategy, overlaps: bool) -> None:
    """Defect: a collective reads the memory of a tensor that is not contiguous."""
    model = apis.WRAPPED.shard(strategy=strategy)
    set_reduction_overlap(model, overlaps)
    flat = list(model.parameters())
    for parameter in flat:
        parameter.register_hook(lambda gradient: torch.ones((), device=gradient.device).expand_as(gradient))
    iterate(model)
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in flat)
    with model.no_sync():
        iterate(model, 1)
    iterate(model, 2)
    assert all(torch.equal(parameter.grad, torch.full_like(parameter, 3.0)) for parameter in flat)
