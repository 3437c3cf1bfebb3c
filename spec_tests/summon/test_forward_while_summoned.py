"""A forward inside ``summon_full_params``: evaluation loops, and ``generate()`` of an inner module."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

summon = FullyShardedDataParallel.summon_full_params
PAIRS = [(strategy, orig) for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD) for orig in (False, True)]
pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)


def outputs(model: nn.Module) -> list[Tensor]:
    """The outputs of the model, of the module inside its wrapper if there is one, and of one block."""
    inner = model.module if isinstance(model, FullyShardedDataParallel) else model
    return [model(batch()), inner(batch()), inner.blocks[1](batch())]


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@pytest.mark.spec("PROG-01")
@pairs
@ranks(2)
def test_forward_inside_returns_output_of_plain_model(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model, plain = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params), seeded()
    for step, (recurse, recorded) in enumerate([(True, False), (False, False), (True, True), (False, True)]):
        with torch.set_grad_enabled(recorded):
            with summon(model, recurse=recurse, writeback=False), Wire() as wire:
                assert_equal(outputs(model), outputs(plain))
            assert recurse is False or wire.sent == []
            assert torch.equal(model(batch()), plain(batch()))
        fresh = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
        assert iterate(model, step) == iterate(fresh, step)
        assert_same(full_values(model), named(plain), bitwise=True)
        model.zero_grad()


@pytest.mark.spec("PROG-01")
@pairs
@ranks(2)
def test_forward_inside_uses_changed_values(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    for writeback in (True, False):
        model, plain = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params), seeded()
        with torch.no_grad():
            with summon(model, writeback=writeback):
                for parameter in (*model.parameters(), *plain.parameters()):
                    parameter.add_(0.5)
                assert_equal(outputs(model), outputs(plain))
                assert_same(named(model), named(plain), bitwise=True)
            kept = plain if writeback or strategy is NO_SHARD else seeded()
            assert torch.equal(model(batch()), kept(batch()))


@pytest.mark.spec("PROG-01")
@pairs
@ranks(2)
def test_forward_inside_with_other_options(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    low = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    for model in (wrapped(mixed_precision=low, **options), wrapped(cpu_offload=CPUOffload(True), **options)):
        with torch.no_grad():
            before = model(batch())
            with summon(model, writeback=False):
                assert_equal(outputs(model), outputs(seeded()))
            assert torch.equal(model(batch()), before)
            with summon(model.module.blocks[1], writeback=False):
                assert torch.equal(model.module.blocks[1](batch()), seeded().blocks[1](batch()))
        loss_of(model(batch())).backward()


@pytest.mark.spec("PROG-01")
@pairs
@ranks(2)
def test_first_rank_alone_runs_forward(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    with torch.no_grad(), summon(model, writeback=False, rank0_only=True):
        if dist.get_rank() == 0:
            assert_equal(outputs(model), outputs(seeded()))
        else:
            with pytest.raises(RuntimeError, match=r"rank 1: forward of unit.*rank0_only"):
                model(batch())
    assert iterate(model) == iterate(wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params))


@pytest.mark.spec("PROG-02")
@pairs
@ranks(2)
def test_backward_of_forward_inside_raises_by_name(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    for recurse in (True, False):
        model = wrapped(**options)
        iterate(model)
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with summon(model, recurse=recurse):
            inside = [loss_of(model(batch())), loss_of(model.module(batch()))]
            later = loss_of(model(batch()))
            x = batch().requires_grad_()
            (gradient,) = torch.autograd.grad(loss_of(model(x)), x)
            assert torch.equal(gradient, torch.autograd.grad(loss_of(seeded()(x)), x)[0])
            for loss in inside:
                with pytest.raises(RuntimeError, match=r"rank \d: a backward has reached the full parameters of unit"):
                    loss.backward()
        with pytest.raises(RuntimeError, match=r"rank \d: a backward has reached the full parameters of unit"):
            later.backward()
        # With `recurse=False`, units that are not summoned may have accumulated gradients before the error.
        for parameter, gradient in zip(model.parameters(), before, strict=True) if recurse else ():
            assert (parameter.grad is None and gradient is None) or torch.equal(parameter.grad, gradient)
        model.zero_grad()
        assert iterate(model) == iterate(wrapped(**options))


@pytest.mark.spec("PROG-02")
@ranks(2)
def test_backward_with_summoned_gradients_raises_by_name() -> None:
    model = wrapped(use_orig_params=True)
    iterate(model)
    with summon(model, with_grads=True), pytest.raises(RuntimeError, match="a backward has reached"):
        loss_of(model.module(batch())).backward()


@pytest.mark.spec("PROG-01")
@pairs
@ranks(2)
def test_a_forward_inside_does_not_affect_a_backward_that_is_still_to_come(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model, fresh = (wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params) for _ in range(2))
    loss = loss_of(model(batch()))
    with torch.no_grad(), summon(model, writeback=False):
        assert_equal(outputs(model), outputs(seeded()))
    loss.backward()
    iterate(fresh)
    for ours, expected in zip(model.parameters(), fresh.parameters(), strict=True):
        assert (ours.grad is None) is (expected.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, expected.grad)


@pytest.mark.spec("PROG-01")
@pairs
@ranks(2)
def test_after_an_error_in_a_forward_inside_the_model_computes_and_trains(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model, fresh = (wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params) for _ in range(2))
    with torch.no_grad(), summon(model, writeback=False):
        with pytest.raises(IndexError, match="out of range"):
            model(batch(), order=(0, 1, 9))
        assert_equal(outputs(model), outputs(seeded()))
    assert iterate(model) == iterate(fresh)


@pytest.mark.spec("PROG-01")
@pairs
@ranks(2)
def test_units_around_a_summoned_unit_run_as_usual(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model, fresh = (wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params) for _ in range(2))
    with summon(model.module.blocks[1], writeback=False):
        with torch.no_grad():
            assert torch.equal(model(batch()), seeded()(batch()))
        loss_of(model.module.blocks[0](batch())).backward()
    model.zero_grad()
    assert iterate(model) == iterate(fresh)
