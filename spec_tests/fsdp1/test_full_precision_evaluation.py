"""``FSDP_USE_FULL_PREC_IN_EVAL=1``: evaluation mode computes in full precision, training mode in low precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

every_strategy = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


class Scale(nn.Module):
    """A module whose values cannot be represented in bfloat16."""

    def __init__(self, *, with_buffer: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.37, 16))
        self.shift = nn.Parameter(torch.linspace(0.2, 0.9, 16))
        self.register_buffer("factor", torch.linspace(0.7, 1.3, 16) if with_buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.weight + self.shift
        return result if self.factor is None else result * self.factor


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = Scale(**options), Scale(**options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def make(monkeypatch: pytest.MonkeyPatch, strategy: str, plain: Net, *, low: Any = LOW, **options: Any) -> Any:
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    options |= {"sharding_strategy": ShardingStrategy[strategy], "mixed_precision": MixedPrecision(**low)}
    options["device_id"] = device()
    model = copy.deepcopy(plain)
    model.first = FullyShardedDataParallel(model.first, **options)  # type: ignore[assignment]
    model.second = FullyShardedDataParallel(model.second, **options)  # type: ignore[assignment]
    return FullyShardedDataParallel(model, **options)


def batch() -> Tensor:
    return torch.linspace(0.123, 1.77, 16).to(device())


def is_exact(model: nn.Module, plain: nn.Module, *, records: bool = False) -> bool:
    with torch.set_grad_enabled(records):
        got, expected = model(batch()), plain(batch())
    return got.dtype is expected.dtype and bool(torch.allclose(got, expected, rtol=1e-6))


def full_gradient(model: Any) -> Tensor:
    """The sum of squares of all units' gradients, padding included."""
    local_shards = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat(local_shards) if local_shards else torch.empty(0, device=device())
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    return torch.cat(gathered).double().square().sum()


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_evaluation_is_exact_after_any_earlier_unshard(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain = Net().to(device())

        def trained(model: Any, **_: Any) -> None:
            model(batch()).float().sum().backward()

        def kept(model: Any) -> None:
            with model.no_sync():
                trained(model)

        for before in (lambda model: None, trained, kept, lambda model: model(batch()), lambda model: model.apply(id)):
            for records in (False, True):
                model = make(patch, strategy, plain, forward_prefetch=True)
                for _ in range(2):
                    before(model)
                    model.eval()
                    assert is_exact(model, plain, records=records)
                    assert is_exact(model, plain, records=records)
                    model.train()
                    assert not is_exact(model, plain)
                    assert model(batch()).dtype is torch.bfloat16


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_a_backward_in_evaluation_mode_does_not_round_its_gradients(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain = Net().to(device())
        for low in (LOW, {"reduce_dtype": torch.bfloat16}, LOW | {"keep_low_precision_grads": True}):
            model = make(patch, strategy, plain, low=low)
            model(batch()).float().sum().backward()
            for one in (model, plain):
                one.zero_grad()
                one.eval()
                one(batch()).sum().backward()
            count = dist.get_world_size() if strategy == "NO_SHARD" else 1
            expected = sum(p.grad.double().square().sum() for p in plain.parameters() if p.grad is not None)
            assert torch.allclose(full_gradient(model) / count, torch.as_tensor(expected), rtol=1e-6)
            model.zero_grad()
            model.train()
            model(batch()).float().sum().backward()
            assert not torch.allclose(full_gradient(model) / count, torch.as_tensor(expected), rtol=1e-6)


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_training_mode_of_the_wrapped_module_determines_the_precision(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain = Net().to(device())
        model = make(patch, strategy, plain)
        model(batch())
        assert model.training
        model.module.eval()
        assert is_exact(model, plain)
        model.module.train()
        assert not is_exact(model, plain)
        # Switch only one unit to evaluation mode.
        model.module.second.module.eval()
        with torch.no_grad():
            assert model(batch()).dtype is torch.float32


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_an_evaluation_between_a_forward_and_its_backward_changes_neither(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain = Net().to(device())
        models = [make(patch, strategy, plain) for _ in range(2)]
        for disturbed, model in enumerate(models):
            loss = model(batch()).float().sum()
            if disturbed:
                model.eval()
                assert is_exact(model, plain)
                model.train()
            loss.backward()
        for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(first.grad, second.grad)


@pytest.mark.spec("FRESH-08")
@ranks(2)
def test_one_backward_after_forwards_in_both_modes_gives_the_gradients_of_both() -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain = Net().to(device())
        model = make(patch, "NO_SHARD", plain)
        for one in (model, plain):
            one.eval()
            in_evaluation = one(batch()).sum()
            one.train()
            (in_evaluation + one(batch()).float().sum()).backward()
            assert all(p.grad is not None for p in one.parameters())
        both = torch.cat([p.grad.flatten() for p in model.parameters()])
        expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
        assert torch.allclose(both, expected, rtol=0.02)


@pytest.mark.spec("FRESH-08")
@every_strategy
@ranks(2)
def test_buffers_are_in_full_precision_too(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain = Net(with_buffer=True).to(device())
        model = make(patch, strategy, plain, low=LOW | {"buffer_dtype": torch.bfloat16})
        model.eval()
        assert is_exact(model, plain)
        model.train()
        model(batch())
        assert model.module.first.module.factor.dtype is torch.bfloat16
        model.eval()
        with torch.no_grad():
            assert model(batch()).dtype is torch.float32
        assert model.module.first.module.factor.dtype is torch.float32
