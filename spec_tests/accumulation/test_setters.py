"""Switches of gradient accumulation: unreduced, partially reduced, and with parameters kept unsharded.

The switches that have a counterpart in the wrapper are tested in ``accumulation/test_accumulation.py``.

The reference model is the plain model, which uses the batches of all ranks. It sums micro-batches in the same order, so
on two ranks the results must be bitwise equal.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.harness import device, ranks
from spec_tests.models import apis, running, values
from spec_tests.models.modules import seeded
from spec_tests.subject import MixedPrecisionPolicy, ShardingStrategy, fully_shard, trace

# --- set_requires_gradient_sync ---


@pytest.mark.spec("FS2-SYNC-01")
@ranks(2)
def test_kept_gradient_is_reduced_if_the_last_micro_batch_skips_its_unit() -> None:
    """Defect: gradients that a unit keeps unreduced stay there if the last micro-batch does not use the unit."""
    model, plain = apis.FULLY_SHARD.shard(), seeded()
    model.set_requires_gradient_sync(False)
    running.iterate(model, 0)
    model.set_requires_gradient_sync(True)
    for each in (model, plain):
        each.order = (0, 3)
    running.iterate(model, 1)
    expected = values.mean_gradients(plain, (1,))
    for name, gradient in values.mean_gradients(seeded(), (0,)).items():
        expected[name] = expected[name] + gradient if name in expected else gradient
    values.assert_same(apis.FULLY_SHARD.gradients(model), expected, bitwise=False)


@pytest.mark.spec("FS2-SYNC-01", "FS2-MP-03")
@ranks(2)
def test_unreduced_gradients_add_up_in_the_dtype_of_the_reduction() -> None:
    """In bfloat16, 1 + 1/512 rounds to 1. Accumulation in float32 keeps the second term."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = seeded(lambda: torch.nn.Linear(2, 2, bias=False))
    fully_shard(model, mp_policy=policy)
    for sync, size in ((False, 1.0), (True, 1 / 512)):
        model.set_requires_gradient_sync(sync)
        x = torch.full((1, 2), size, dtype=torch.bfloat16, device=model.weight.device)
        model(x).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full_like(model.weight.grad.full_tensor(), 1 + 1 / 512))


@pytest.mark.spec("FS2-SYNC-01", "NEW-08")
@pytest.mark.parametrize(("setting", "kind"), [("set_requires_gradient_sync", "RS"), ("set_requires_all_reduce", "AR")])
@ranks(4)
def test_a_setting_applies_to_inner_units_by_default_and_may_be_changed_for_one(setting: str, kind: str) -> None:
    model = apis.FULLY_SHARD.shard(strategy=ShardingStrategy.HYBRID_SHARD)
    getattr(model, setting)(False, recurse=False)
    with trace.record() as recorder:
        running.iterate(model)
    assert sorted(recorder.order(kind)) == [f"{kind} blocks.{index}" for index in range(4)]
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith("blocks.")
    getattr(model, setting)(False)
    getattr(model.blocks[2], setting)(True)
    with trace.record() as recorder:
        running.iterate(model)
    assert recorder.order(kind) == [f"{kind} blocks.2"]


# --- set_requires_all_reduce ---


# For each micro-batch: the calls before it, with their value.
SETTERS = [
    [{"all_reduce": False}, {}, {"all_reduce": True}],
    [{"gradient_sync": False, "all_reduce": False}, {"gradient_sync": True, "all_reduce": False}, {"all_reduce": True}],
    [{"all_reduce": False}, {"gradient_sync": True}],
]


@pytest.mark.spec("NEW-08", "FS2-SYNC-01")
@pytest.mark.parametrize("setters", SETTERS)
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD])
@ranks(4)
def test_the_last_of_several_backwards_all_reduces_the_sum(
    strategy: ShardingStrategy, setters: list[dict[str, bool]]
) -> None:
    model = apis.FULLY_SHARD.shard(strategy=strategy)
    for _ in range(2):
        for step, calls in enumerate(setters):
            for name, value in calls.items():
                getattr(model, f"set_requires_{name}")(value)
            with running.Wire() as wire:
                running.iterate(model, step)
            is_last = step == len(setters) - 1
            assert len(wire.calls("AR")) == 5 * is_last
            assert (apis.FULLY_SHARD.gradients(model) == {}) is not is_last
        values.assert_same(apis.FULLY_SHARD.gradients(model), values.mean_gradients(seeded(), range(len(setters))))
        model.zero_grad()


@pytest.mark.spec("NEW-08")
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD])
@ranks(4)
def test_partial_sums_of_different_parameters_are_joined(strategy: ShardingStrategy) -> None:
    model, plain = apis.FULLY_SHARD.shard(strategy=strategy), seeded()
    bias = "blocks.1.linear.bias"
    for step, (trains, reduces) in enumerate([(True, False), (False, False), (True, True)]):
        model.set_requires_all_reduce(reduces)
        model.blocks[1].linear.bias.requires_grad_(trains)
        running.iterate(model, step)
    expected = values.mean_gradients(plain, range(3))
    # The second backward has no gradient of this parameter.
    expected[bias] -= values.mean_gradients(seeded(), [1])[bias]
    values.assert_same(apis.FULLY_SHARD.gradients(model), expected)


@pytest.mark.spec("NEW-08")
@ranks(2)
def test_set_requires_all_reduce_has_no_effect_on_a_one_dimensional_mesh() -> None:
    model = apis.FULLY_SHARD.shard()
    model.set_requires_all_reduce(False)
    running.iterate(model)
    values.assert_same(apis.FULLY_SHARD.gradients(model), values.mean_gradients(seeded()))


# --- set_is_last_backward ---


@pytest.mark.spec("NEW-07")
@ranks(2)
def test_several_backwards_of_one_iteration_give_the_sum_on_cpus_after_each_of_them() -> None:
    model = apis.FULLY_SHARD.shard()
    losses = [model(running.batch(step)).square().mean() for step in range(3)]
    for index, loss in enumerate(losses):
        model.set_is_last_backward(index == 2)
        loss.backward()
        # An accelerator continues with the last reduction.
        if index == 2 or device().type == "cpu":
            steps = [(step,) for step in range(index + 1)]
            expected = values.accumulated_gradients(seeded(), *steps)
            values.assert_same(apis.FULLY_SHARD.gradients(model), expected, bitwise=False)


@pytest.mark.spec("NEW-07")
@ranks(2)
def test_prefetch_uses_the_orders_of_earlier_forwards_until_the_last_backward() -> None:
    """Two forwards, then two backwards: the second backward also prefetches in the right order."""
    orders = []
    for reported in (True, False):
        model = apis.FULLY_SHARD.shard()
        losses = [model(running.batch(step)).square().mean() for step in range(2)]
        if reported:
            model.set_is_last_backward(False)
        losses[1].backward()
        model.set_is_last_backward(True)
        with trace.record() as recorder:
            losses[0].backward()
        words = [event.kind + event.unit.removeprefix("blocks.") for event in recorder.events]
        orders.append(words.index("AG2") < words.index("RS3"))
        assert recorder.count("RS") == 5
    assert orders == [True, False]


@pytest.mark.spec("NEW-07")
@ranks(2)
def test_iteration_after_the_last_backward_has_the_usual_order() -> None:
    model = apis.FULLY_SHARD.shard()
    usual = running.recorded_iteration(model)
    model.set_is_last_backward(False)
    running.iterate(model)
    model.set_is_last_backward(True)
    running.iterate(model)
    assert running.recorded_iteration(model) == usual


# --- gradients that are not reduced yet ---


@pytest.mark.spec("GRAD-03", "NEW-07", "FUZZ-04")
@pytest.mark.parametrize(
    ("switch", "set_to_none", "had_reduced"),
    [
        ("set_requires_gradient_sync", False, True),
        ("set_requires_all_reduce", True, False),
        ("set_is_last_backward", False, True),
    ],
)
@ranks(4)
def test_zero_grad_drops_gradients_that_are_not_reduced_yet(switch: str, set_to_none: bool, had_reduced: bool) -> None:
    model = apis.FULLY_SHARD.shard(strategy=ShardingStrategy.HYBRID_SHARD)
    if had_reduced:
        running.iterate(model, 0)
    getattr(model, switch)(False)
    running.iterate(model, 1)
    model.zero_grad(set_to_none=set_to_none)
    getattr(model, switch)(True)
    running.iterate(model, 2)
    values.assert_same(apis.FULLY_SHARD.gradients(model), values.mean_gradients(seeded(), (2,)))


@pytest.mark.spec("NEW-07", "FUZZ-04")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.accelerator
@ranks(2)
def test_zero_grad_clears_the_gradient_whose_reduction_is_in_flight(set_to_none: bool) -> None:
    """On CPUs, the reduction is complete when a backward ends."""
    model = apis.FULLY_SHARD.shard()
    model.set_is_last_backward(False)
    running.iterate(model, 0)
    model.zero_grad(set_to_none=set_to_none)
    model.set_is_last_backward(True)
    running.iterate(model, 1)
    values.assert_same(apis.FULLY_SHARD.gradients(model), values.mean_gradients(seeded(), (1,)))
