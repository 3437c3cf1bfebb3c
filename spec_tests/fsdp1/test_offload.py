"""CPU offload of shards and gradients.

Without an accelerator there is no second device. The tests then use the tracer to check when a copy would be made, and
compare values to check that no data is lost. Tests marked ``gpu`` check the devices of the tensors. torch's wrapper
cannot offload without an accelerator, so the references are the unwrapped model and minifsdp's wrapper without offload.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.nn.parallel import DistributedDataParallel

from spec_tests.checkpoint.checkpoints import is_plain
from spec_tests.fsdp1.whole import group_of, whole
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, seeded
from spec_tests.models.running import batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, HYBRID_STRATEGIES, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, full_values, mean_gradients, named
from spec_tests.subject import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    trace,
)

PAIRS = [(FULL_SHARD, False), (FULL_SHARD, True), (SHARD_GRAD_OP, True), (NO_SHARD, False), (NO_SHARD, True)]
pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)
sharding_pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS[:3])


def offloaded(**options: Any) -> FullyShardedDataParallel:
    return wrapped(cpu_offload=CPUOffload(offload_params=True), **options)


# --- the option ---


@pytest.mark.spec("OFF-01")
@pytest.mark.pure
def test_cpu_offload_has_one_field_with_default_false() -> None:
    for record in (CPUOffload, torch_fsdp.CPUOffload):
        assert [(field.name, field.default) for field in dataclasses.fields(record)] == [("offload_params", False)]
    assert CPUOffload(True).offload_params is True
    assert CPUOffload(offload_params=True) == CPUOffload(True)
    for keywords in ({"offload_grads": True}, {"pin_memory": True}, {"offload_params": True, "offload_state": True}):
        with pytest.raises(TypeError):
            CPUOffload(**keywords)


@pytest.mark.spec("OFF-01")
@pytest.mark.parametrize("options", [{}, {"cpu_offload": None}, {"cpu_offload": CPUOffload()}])
@ranks(2)
def test_none_and_the_default_mean_no_offload(options: dict[str, Any]) -> None:
    model = wrapped(**options)
    with trace.record() as recorder:
        iterate(model)
    assert not {"H2D", "D2H"} & {event.kind for event in recorder.events}
    assert {parameter.device for parameter in model.parameters()} == {device()}


# --- devices and copies ---

KINDS = ("H2D", "AG", "F", "B", "RS", "D2H")
ORDERS = {
    FULL_SHARD: ["H2D", "AG", "F", "H2D", "AG", "B", "RS", "D2H"],
    SHARD_GRAD_OP: ["H2D", "AG", "F", "B", "RS", "D2H"],
}


@pytest.mark.spec("OFF-02", "OFF-03")
@sharding_pairs
@ranks(2)
def test_offload_copies_for_each_all_gather_and_reduction(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = offloaded(sharding_strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with trace.record() as recorder:
            iterate(model, step)
        for unit in UNITS[1:]:
            assert of_unit(recorder, unit, *KINDS) == ORDERS[strategy]
        assert of_unit(recorder, "", *KINDS) == ORDERS[SHARD_GRAD_OP], "the root stays gathered in between"
        copies = {(event.kind, event.unit): event.num_bytes for event in recorder.events if "2" in event.kind}
        assert copies == {(kind, unit): 4 * (21 if unit else 28) for unit in UNITS for kind in ("H2D", "D2H")}
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.spec("OFF-02")
@ranks(2)
def test_evaluation_copies_shards_to_the_device_and_nothing_back() -> None:
    model = offloaded().eval()
    with trace.record() as recorder, torch.no_grad():
        model(batch())
    assert [event.kind for event in recorder.events if event.kind in ("H2D", "AG", "D2H")] == ["H2D", "AG"] * len(UNITS)


@pytest.mark.accelerator
@pytest.mark.spec("OFF-02", "OFF-03")
@pairs
@ranks(2)
def test_shards_gradients_and_optimizer_state_are_on_the_cpu(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    plain = seeded()
    seen: list[torch.device] = []
    for layer in (plain.enter, plain.blocks[1].linear):
        layer.register_forward_hook(lambda layer, i, o: seen.extend([layer.weight.device, o.device]))
    model = wrapped(
        plain,
        cpu_offload=CPUOffload(True),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        device_id=device(),
    )
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        assert {(p.device.type, p.is_pinned()) for p in model.parameters() if p.numel()} == {("cpu", True)}
        iterate(model, step)
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cpu"}
        optimizer.step()
        optimizer.zero_grad()
    state = [value for of in optimizer.state.values() for key, value in of.items() if key.startswith("exp_")]
    assert {value.device.type for value in state} == {"cpu"}
    assert set(seen) == {device()}


@pytest.mark.accelerator
@pytest.mark.spec("OFF-06")
@ranks(2)
def test_inside_no_sync_gradients_are_on_the_device() -> None:
    model = offloaded(device_id=device())
    with model.no_sync():
        iterate(model)
    assert {parameter.grad.device for parameter in model.parameters()} == {device()}
    iterate(model, 1)
    assert {parameter.grad.device.type for parameter in model.parameters()} == {"cpu"}


# --- results ---


@pytest.mark.spec("OFF-04")
@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)])
@pairs
@ranks(2)
def test_training_with_offload_is_bit_by_bit_that_without(
    strategy: ShardingStrategy, use_orig_params: bool, precision: MixedPrecision | None
) -> None:
    trained = []
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, "mixed_precision": precision}
    for build in (wrapped, offloaded):
        model = build(**options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(4):
            iterate(model, step)
            optimizer.step()
            optimizer.zero_grad()
        trained.append(full_values(model))
    # A parameter that is not sharded is not all-gathered either, so it stays on the device that stores it.
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-6, atol=1e-7, check_device=False)
    if device().type == "cpu":
        assert_same(trained[0], trained[1], bitwise=True)
    assert not torch.equal(trained[0]["enter.weight"], seeded().enter.weight)


@pytest.mark.spec("OFF-04")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_training_with_offload_is_that_of_distributed_data_parallel(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = offloaded(sharding_strategy=strategy, use_orig_params=use_orig_params)
    parallel = DistributedDataParallel(seeded())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, parallel)]
    for step in range(3):
        for each, optimizer in zip((model, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            iterate(each, step)
            optimizer.step()
    torch.testing.assert_close(full_values(model), named(parallel.module), rtol=1e-5, atol=1e-6, check_device=False)


# --- accumulation ---


@pytest.mark.spec("OFF-05")
@pairs
@ranks(2)
def test_accumulating_outside_no_sync_adds_up(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    plain = seeded()
    model = offloaded(sharding_strategy=strategy, use_orig_params=use_orig_params)
    gradients: dict[str, torch.Tensor] = {}
    for step in range(3):
        iterate(model, step)
        one = mean_gradients(plain, [step])
        gradients = {name: gradients[name] + one[name] for name in one} if gradients else one
        assert_same(whole(model, group=group_of(strategy))[1], gradients, bitwise=True)
    model.zero_grad()
    iterate(model, 3)
    assert_same(whole(model, group=group_of(strategy))[1], mean_gradients(plain, [3]), bitwise=True)


@pytest.mark.spec("OFF-06")
@pairs
@ranks(2)
def test_no_sync_copies_nothing_to_the_cpu_until_the_reducing_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    plain = seeded()
    model = offloaded(sharding_strategy=strategy, use_orig_params=use_orig_params)
    for round_ in range(2):
        with trace.record() as inside, model.no_sync():
            for step in range(2):
                iterate(model, 3 * round_ + step)
        assert "D2H" not in {event.kind for event in inside.events}
        with trace.record() as last:
            iterate(model, 3 * round_ + 2)
        reduction = "AR" if strategy is NO_SHARD else "RS"
        for unit in UNITS:
            assert of_unit(last, unit, "B", reduction, "D2H") == ["B", reduction, "D2H"]
        expected = mean_gradients(plain, range(3 * round_, 3 * round_ + 3))
        assert_same(whole(model, group=group_of(strategy))[1], expected, bitwise=False)
        model.zero_grad()


# --- clipping ---


@pytest.mark.spec("OFF-07")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_clipping_returns_the_right_norm_on_every_rank(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    plain = seeded()
    model = offloaded(sharding_strategy=strategy, use_orig_params=use_orig_params)
    group = model.process_group if strategy in HYBRID_STRATEGIES else group_of(strategy)
    for step, norm_type in enumerate((2.0, 1.0, "inf")):
        model.zero_grad()
        iterate(model, step)
        expected = mean_gradients(plain, [step])
        copies = [copy.deepcopy(parameter) for parameter in plain.parameters()]
        for one, gradient in zip(copies, expected.values(), strict=True):
            one.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(copies, 0.3, float(norm_type))
        returned = model.clip_grad_norm_(0.3, norm_type)
        everybody = [torch.empty_like(returned) for _ in range(4)]
        dist.all_gather(everybody, returned)
        assert all(torch.equal(each, returned) for each in everybody)
        torch.testing.assert_close(returned.cpu(), norm.cpu())
        clipped = {name: one.grad for name, one in zip(expected, copies, strict=True)}
        torch.testing.assert_close(whole(model, group=group)[1], clipped, rtol=1e-5, atol=1e-6)


@pytest.mark.accelerator
@pytest.mark.spec("OFF-07")
@ranks(2)
def test_clipping_works_on_gradients_on_the_cpu() -> None:
    model = offloaded(device_id=device())
    iterate(model)
    before = torch.cat([gradient.reshape(-1) for gradient in mean_gradients(seeded()).values()])
    returned = model.clip_grad_norm_(0.1)
    torch.testing.assert_close(returned.cpu(), before.norm().cpu(), rtol=1e-4, atol=1e-5)
    assert {parameter.grad.device.type for parameter in model.parameters()} == {"cpu"}
    after = torch.cat([gradient.reshape(-1) for gradient in whole(model)[1].values()])
    torch.testing.assert_close(after.norm().cpu(), torch.tensor(0.1), rtol=1e-4, atol=1e-5)


@pytest.mark.spec("OFF-04", "STREAM-15")
@pairs
@ranks(2)
def test_forward_uses_cpu_values_changed_by_user(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = offloaded(sharding_strategy=strategy, use_orig_params=use_orig_params)
    expected = seeded()
    with torch.no_grad():
        model(batch())
        for parameter in (*model.parameters(), *expected.parameters()):
            parameter.mul_(2.0)
        torch.testing.assert_close(model(batch()), expected(batch()))
    loss_of(model(batch())).backward()


# --- state dicts ---


@pytest.mark.spec("OFF-08", "SD-FULL-01", "SD-FULL-08", "SD-SHARD-02", "SD-SHARD-03")
@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
@pairs
@ranks(2)
def test_state_dicts_of_offloaded_units_equal_those_of_other_units_and_can_be_loaded(
    strategy: ShardingStrategy, use_orig_params: bool, kind: StateDictType
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}

    def state_of(model: FullyShardedDataParallel) -> dict[str, Any]:
        with FullyShardedDataParallel.state_dict_type(model, kind):
            return model.state_dict()

    def trained(model: FullyShardedDataParallel) -> FullyShardedDataParallel:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        iterate(model)
        optimizer.step()
        return model

    model = trained(offloaded(**options))
    state, expected = state_of(model), state_of(trained(wrapped(**options)))
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert is_plain(state[name]) if is_plain(value) else type(state[name]) is type(value)
        assert state[name].shape == value.shape
    again = offloaded(**options)
    with FullyShardedDataParallel.state_dict_type(again, kind):
        again.load_state_dict(state)
    assert_same(full_values(again), full_values(model), bitwise=True)
    on_device = {name: value.to(device()) for name, value in full_values(again).items()}
    assert_same(on_device, full_values(trained(wrapped(**options))), bitwise=True)
    assert {parameter.device.type for parameter in again.parameters()} == {"cpu"}
