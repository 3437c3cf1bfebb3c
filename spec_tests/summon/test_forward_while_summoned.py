"""A forward inside ``summon_full_params``: evaluation loops, and ``generate()`` of an inner module."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests.harness import ranks
from spec_tests.models import apis, running, values
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.subject import CPUOffload, FullyShardedDataParallel, MixedPrecision

summon = FullyShardedDataParallel.summon_full_params
batch, loss_of = running.batch, running.loss_of
each_setting = apis.settings_of(*itertools.product((apis.WRAPPED, apis.ORIGINALS), apis.FLAT_STRATEGIES))


def assert_same_outputs(model: Any, plain: Any) -> None:
    """The model, the module inside its wrapper, and one block have the outputs of the plain model."""
    assert torch.equal(model(batch()), plain(batch()))
    assert torch.equal(model.module(batch()), plain(batch()))
    assert torch.equal(model.module.blocks[1](batch()), plain.blocks[1](batch()))


@pytest.mark.spec("PROG-01")
@each_setting
@ranks(2)
def test_forward_inside_returns_output_of_plain_model(api: apis.Api, strategy: Any) -> None:
    model, plain = api.shard(strategy=strategy), seeded()
    for recorded, recurse in itertools.product([False, True], [True, False]):
        with torch.set_grad_enabled(recorded):
            with summon(model, recurse=recurse, writeback=False), running.Wire() as wire:
                assert_same_outputs(model, plain)
            assert recurse is False or wire.sent == []
            assert torch.equal(model(batch()), plain(batch()))
        assert_trains_like(model, plain)


@pytest.mark.spec("PROG-01")
@pytest.mark.parametrize("writeback", [True, False])
@each_setting
@ranks(2)
def test_forward_inside_uses_changed_values(api: apis.Api, strategy: Any, writeback: bool) -> None:
    model, plain = api.shard(strategy=strategy), seeded()
    with torch.no_grad():
        with summon(model, writeback=writeback):
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.add_(0.5)
            assert_same_outputs(model, plain)
            values.assert_same(dict(model.named_parameters()), values.named(plain))
        kept = plain if writeback or strategy is apis.NO_SHARD else seeded()
        assert torch.equal(model(batch()), kept(batch()))


@pytest.mark.spec("PROG-01")
@pytest.mark.parametrize("option", ["mixed_precision", "cpu_offload"])
@each_setting
@ranks(2)
def test_forward_inside_with_other_options(api: apis.Api, strategy: Any, option: str) -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model = api.shard(strategy=strategy, **{option: low if option == "mixed_precision" else CPUOffload(True)})
    with torch.no_grad():
        before = model(batch())
        with summon(model, writeback=False):
            assert_same_outputs(model, seeded())
        assert torch.equal(model(batch()), before)
        block = model.module.blocks[1]
        with summon(block, writeback=False):
            assert torch.equal(block(batch()), seeded().blocks[1](batch()))
    loss_of(model(batch())).backward()


@pytest.mark.spec("PROG-01")
@each_setting
@ranks(2)
def test_first_rank_alone_runs_forward(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    with torch.no_grad(), summon(model, writeback=False, rank0_only=True):
        if dist.get_rank() == 0:
            assert_same_outputs(model, seeded())
        else:
            with pytest.raises(RuntimeError, match=r"rank 1: forward of unit.*rank0_only"):
                model(batch())
    assert_trains_like(model)


@pytest.mark.spec("PROG-02")
@pytest.mark.parametrize("recurse", [True, False])
@each_setting
@ranks(2)
def test_backward_of_forward_inside_raises_by_name(api: apis.Api, strategy: Any, recurse: bool) -> None:
    model = api.shard(strategy=strategy)
    running.iterate(model)
    before = api.gradients(model)
    message = r"rank \d: a backward has reached the full parameters of unit"
    with summon(model, recurse=recurse):
        losses = [loss_of(model(batch())), loss_of(model.module(batch()))]
        later = loss_of(model(batch()))
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model(x)), x)
        (expected,) = torch.autograd.grad(loss_of(seeded()(x)), x)
        assert torch.equal(gradient, expected), "of the input"
        for loss in losses:
            with pytest.raises(RuntimeError, match=message):
                loss.backward()
    with pytest.raises(RuntimeError, match=message):
        later.backward()
    # With `recurse=False`, units that are not summoned may have accumulated gradients before the error.
    if recurse:
        values.assert_same(api.gradients(model), before)
    model.zero_grad()
    assert_trains_like(model)


@pytest.mark.spec("PROG-02")
@ranks(2)
def test_backward_with_summoned_gradients_raises_by_name() -> None:
    model = apis.ORIGINALS.shard()
    running.iterate(model)
    with summon(model, with_grads=True), pytest.raises(RuntimeError, match="a backward has reached"):
        loss_of(model.module(batch())).backward()


@pytest.mark.spec("PROG-01")
@each_setting
@ranks(2)
def test_a_forward_inside_does_not_affect_a_backward_that_is_still_to_come(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    loss = loss_of(model(batch()))
    with torch.no_grad(), summon(model, writeback=False):
        assert_same_outputs(model, seeded())
    loss.backward()
    values.assert_same(api.gradients(model), values.mean_gradients(seeded()))


@pytest.mark.spec("PROG-01")
@each_setting
@ranks(2)
def test_after_an_error_in_a_forward_inside_the_model_computes_and_trains(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    with torch.no_grad(), summon(model, writeback=False):
        with pytest.raises(IndexError, match="out of range"):
            model(batch(), order=(0, 1, 9))
        assert_same_outputs(model, seeded())
    assert_trains_like(model)


@pytest.mark.spec("PROG-01")
@each_setting
@ranks(2)
def test_units_around_a_summoned_unit_run_as_usual(api: apis.Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    with summon(model.module.blocks[1], writeback=False):
        with torch.no_grad():
            assert torch.equal(model(batch()), seeded()(batch()))
        loss_of(model.module.blocks[0](batch())).backward()
    model.zero_grad()
    assert_trains_like(model)
