"""CPU offload of shards and gradients.

Without an accelerator there is no second device. The tests then use the tracer to check when a copy would be made, and
compare values to check that no data is lost. Tests marked ``accelerator`` check the devices of the tensors. torch's
wrapper cannot offload without an accelerator, so the references are the plain model and the model without offload.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import is_plain
from spec_tests.harness import device, ranks
from spec_tests.models import apis, modules, running, values
from spec_tests.subject import ShardingStrategy, StateDictType, trace

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy
some_settings = apis.settings_of(
    (apis.WRAPPED, FULL_SHARD),
    (apis.ORIGINALS, NO_SHARD),
    (apis.ORIGINALS, SHARD_GRAD_OP),
    (apis.FULLY_SHARD, FULL_SHARD),
)
wrapper_settings = apis.settings_of((apis.WRAPPED, FULL_SHARD), (apis.ORIGINALS, NO_SHARD))

# --- the options ---


NO_OFFLOAD: list[tuple[Any, dict[str, Any]]] = [
    (apis.WRAPPED, {"cpu_offload": None}),
    (apis.WRAPPED, {"cpu_offload": subject.CPUOffload()}),
    (apis.FULLY_SHARD, {"offload_policy": None}),
    (apis.FULLY_SHARD, {"offload_policy": subject.OffloadPolicy()}),
]


@pytest.mark.api_spec(wrapper=["OFF-01"], fully_shard=["FS2-OFF-01", "MIG-07"])
@pytest.mark.parametrize(("api", "options"), NO_OFFLOAD, ids=apis.name_of)
@ranks(2)
def test_none_and_the_default_mean_no_offload(api: Any, options: dict[str, Any]) -> None:
    model = api.shard(**options)
    with trace.record() as recorder:
        running.iterate(model)
    assert not {"H2D", "D2H"} & {event.kind for event in recorder.events}
    assert {parameter.device.type for parameter in model.parameters()} == {device().type}


# --- devices and copies ---

KINDS = ("H2D", "AG", "F", "B", "RS", "D2H")
ORDERS = {
    FULL_SHARD: ["H2D", "AG", "F", "H2D", "AG", "B", "RS", "D2H"],
    SHARD_GRAD_OP: ["H2D", "AG", "F", "B", "RS", "D2H"],
}


@pytest.mark.api_spec(wrapper=["OFF-02", "OFF-03"])
@apis.settings_of(
    (apis.WRAPPED, FULL_SHARD),
    (apis.ORIGINALS, FULL_SHARD),
    (apis.ORIGINALS, SHARD_GRAD_OP),
    (apis.FULLY_SHARD, FULL_SHARD),
    (apis.FULLY_SHARD, SHARD_GRAD_OP),
)
@ranks(2)
def test_offload_copies_for_each_all_gather_and_reduction(api: Any, strategy: ShardingStrategy) -> None:
    model = api.shard(strategy=strategy, offload=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with trace.record() as recorder:
            running.iterate(model, step, optimizer)
        for unit in modules.UNITS[1:]:
            assert running.of_unit(recorder, unit, *KINDS) == ORDERS[strategy]
        assert running.of_unit(recorder, "", *KINDS) == ORDERS[SHARD_GRAD_OP], "the root stays unsharded after forward"
        copies = {(event.kind, event.unit): event.num_bytes for event in recorder.events if "2" in event.kind}
        assert copies == {(kind, unit): 4 * (21 if unit else 28) for unit in modules.UNITS for kind in ("H2D", "D2H")}


@pytest.mark.api_spec(wrapper=["OFF-02"])
@apis.both_apis
@ranks(2)
def test_evaluation_copies_shards_to_the_device_and_nothing_back(api: Any) -> None:
    model = api.shard(offload=True).eval()
    with trace.record() as recorder, torch.no_grad():
        model(running.batch())
    copies = [event.kind for event in recorder.events if event.kind in ("H2D", "AG", "D2H")]
    assert copies == ["H2D", "AG"] * len(modules.UNITS)


@pytest.mark.api_spec(wrapper=["OFF-02", "OFF-03", "LEGACY-14"], fully_shard=["FS2-OFF-01", "MIG-07"])
@some_settings
@ranks(2)
def test_shards_gradients_and_optimizer_state_are_on_the_cpu(api: Any, strategy: ShardingStrategy) -> None:
    plain = modules.seeded()
    seen: list[torch.device] = []
    for layer in (plain.enter, plain.blocks[1].linear):
        layer.register_forward_hook(lambda layer, i, o: seen.extend([layer.weight.device, o.device]))
    model = api.shard(plain, strategy=strategy, offload=True)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        if api != apis.FULLY_SHARD and device().type != "cpu":
            assert all(parameter.is_pinned() for parameter in model.parameters() if parameter.numel())
        running.iterate(model, step)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert {tensor.device.type for tensor in (*model.parameters(), *gradients)} == {"cpu"}
        optimizer.step()
        optimizer.zero_grad()
    state = [value for of in optimizer.state.values() for key, value in of.items() if key.startswith("exp_")]
    assert {value.device.type for value in state} == {"cpu"}
    assert set(seen) == {device()}


@pytest.mark.spec("FS2-OFF-01")
@pytest.mark.accelerator
@ranks(2)
def test_pinned_memory_is_the_default_and_can_be_left_out() -> None:
    for policy, pinned in ((subject.CPUOffloadPolicy(), True), (subject.CPUOffloadPolicy(pin_memory=False), False)):
        model = apis.FULLY_SHARD.shard(offload_policy=policy)
        assert {p.to_local().is_pinned() for p in model.parameters()} == {pinned}
        running.iterate(model)
        assert {p.grad.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.spec("FS2-OFF-01", "FS2-19")
@ranks(2)
def test_manually_unsharded_params_are_on_compute_device() -> None:
    model = apis.FULLY_SHARD.shard(offload=True)
    model.unshard()
    assert model.enter.weight.device.type == device().type
    model.reshard()
    assert model.enter.weight.device.type == "cpu"


@pytest.mark.accelerator
@pytest.mark.spec("OFF-06")
@ranks(2)
def test_inside_no_sync_gradients_are_on_the_device() -> None:
    model = apis.WRAPPED.shard(offload=True)
    with model.no_sync():
        running.iterate(model)
    assert {parameter.grad.device for parameter in model.parameters()} == {device()}
    running.iterate(model, 1)
    assert {parameter.grad.device.type for parameter in model.parameters()} == {"cpu"}


# --- results ---


@pytest.mark.api_spec(wrapper=["OFF-04"], fully_shard=["FS2-OFF-01", "MIG-07"])
@pytest.mark.parametrize("precision", [None, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
@some_settings
@ranks(2)
def test_training_with_offload_is_bit_by_bit_that_without(
    api: Any, strategy: ShardingStrategy, precision: dict[str, Any] | None
) -> None:
    model, other = (api.shard(offload=offload, strategy=strategy, precision=precision) for offload in (True, False))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, other)]
    # An optimizer on the CPU and one on an accelerator round differently.
    bitwise = device().type == "cpu"
    for step in range(2):
        for each in (model, other):
            with api.no_sync(each):
                running.iterate(each, 2 * step)
            running.iterate(each, 2 * step + 1)
        values.assert_same(api.gradients(model), api.gradients(other), bitwise=bitwise)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values.assert_same(api.values(model), api.values(other), bitwise=bitwise)


@pytest.mark.spec("STREAM-15")
@pytest.mark.api_spec(wrapper=["OFF-04"], fully_shard=["FS2-OFF-01"])
@some_settings
@ranks(2)
def test_forward_uses_cpu_values_changed_by_user(api: Any, strategy: ShardingStrategy) -> None:
    model = api.shard(strategy=strategy, offload=True)
    expected = modules.seeded()
    parameters = list(model.parameters())
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(running.batch()), expected(running.batch()))
            api.reshard(model)
            for parameter in (*parameters, *expected.parameters()):
                parameter.mul_(2.0)
    model(running.batch()).square().mean().backward()


@pytest.mark.spec("MP-12", "OFF-03")
@wrapper_settings
@ranks(2)
def test_offloaded_gradients_keep_the_dtype_of_the_reduction_on_request(api: Any, strategy: Any) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "keep_low_precision_grads": True}
    model = api.shard(strategy=strategy, precision=precision, offload=True)
    for step in range(2):
        running.iterate(model, step)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert {(gradient.dtype, gradient.device.type) for gradient in gradients} == {(torch.bfloat16, "cpu")}


# --- accumulation ---


@pytest.mark.api_spec(wrapper=["OFF-05", "OFF-06"])
@some_settings
@ranks(2)
def test_accumulation_copies_sums_to_the_cpu_in_each_backward_that_reduces(
    api: Any, strategy: ShardingStrategy
) -> None:
    plain = modules.seeded()
    model = api.shard(strategy=strategy, offload=True)
    reduction = "AR" if strategy is NO_SHARD else "RS"
    reduced: list[tuple[int, ...]] = []
    for steps in ((0,), (1,), (2, 3, 4)):
        with trace.record() as inside, api.no_sync(model):
            for step in steps[:-1]:
                running.iterate(model, step)
        assert "D2H" not in {event.kind for event in inside.events}
        with trace.record() as last:
            running.iterate(model, steps[-1])
        for unit in modules.UNITS:
            assert running.of_unit(last, unit, "B", reduction, "D2H") == ["B", reduction, "D2H"]
        reduced.append(steps)
        values.assert_same(api.gradients(model), values.accumulated_gradients(plain, *reduced), bitwise=True)
    model.zero_grad()
    running.iterate(model, 5)
    values.assert_same(api.gradients(model), values.mean_gradients(plain, [5]), bitwise=True)


# --- clipping ---

WITH_CLIPPING = [
    (apis.WRAPPED, FULL_SHARD),
    (apis.ORIGINALS, NO_SHARD),
    (apis.ORIGINALS, HYBRID_SHARD),
    # torch's clipping reduces the norms of DTensors on the CPU. A process group for GPUs only has no backend for that.
    pytest.param(apis.FULLY_SHARD, HYBRID_SHARD_ZERO2, marks=pytest.mark.cpu),
]


@pytest.mark.api_spec(wrapper=["OFF-04", "OFF-07"], fully_shard=["FS2-OFF-01", "FS2-SYNC-01", "FS2-OPT-03", "FS2-18"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize(("api", "strategy"), WITH_CLIPPING, ids=apis.name_of)
@ranks(4)
def test_clipping_returns_the_right_norm_on_every_rank(api: Any, strategy: ShardingStrategy, norm_type: float) -> None:
    plain, model = modules.seeded(), api.shard(strategy=strategy, offload=True)
    with api.no_sync(model):
        running.iterate(model, 0)
    running.iterate(model, 1)
    for name, gradient in values.mean_gradients(plain, [0, 1]).items():
        plain.get_parameter(name).grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3, norm_type)
    returned = api.clip(model, 0.3, norm_type)
    torch.testing.assert_close(returned.to(device()), expected, msg=f"on rank {dist.get_rank()}")
    clipped = {name: parameter.grad for name, parameter in plain.named_parameters()}
    values.assert_same(api.gradients(model), clipped, bitwise=False)


# --- state dicts ---


@pytest.mark.spec("OFF-08", "SD-FULL-01", "SD-FULL-08", "SD-SHARD-02", "SD-SHARD-03")
@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
@wrapper_settings
@ranks(2)
def test_state_dicts_of_offloaded_units_equal_those_of_other_units_and_can_be_loaded(
    api: Any, strategy: ShardingStrategy, kind: StateDictType
) -> None:
    model, other, again = (api.shard(strategy=strategy, offload=offload) for offload in (True, False, True))
    for each in (model, other, again):
        subject.FullyShardedDataParallel.set_state_dict_type(each, kind)
    for each in (model, other):
        running.iterate(each, 0, torch.optim.SGD(each.parameters(), lr=0.1))
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert is_plain(state[name]) if is_plain(value) else type(state[name]) is type(value)
        assert state[name].shape == value.shape
    again.load_state_dict(state)
    on_device = {name: value.to(device()) for name, value in api.values(again).items()}
    values.assert_same(on_device, api.values(other), bitwise=True)
    assert {parameter.device.type for parameter in again.parameters()} == {"cpu"}
