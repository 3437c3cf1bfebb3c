"""Ignored modules and parameters, and the arguments that select them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.subject import (
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    size_based_auto_wrap_policy,
    trace,
)

FSDP = FullyShardedDataParallel
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- the effect ---


@pytest.mark.spec("IGN-01", "IGN-04", "IGN-07", "IGN-11")
@pytest.mark.parametrize("spelling", ["ignored_modules", "modules", "parameters"])
@flat_or_original
@pytest.mark.parametrize("strategy", [*ShardingStrategy][:3])
@ranks(2)
def test_ignored_parameters_are_neither_flattened_nor_sharded_nor_reduced(
    spelling: str, keep: bool, strategy: ShardingStrategy
) -> None:
    plain, reference = seeded(), seeded()
    modules = plain.leave, plain.blocks[1]
    ignored = (*plain.leave.parameters(), *plain.blocks[1].parameters())
    # The argument can be any iterable. A warning would be an error.
    options: Any = {
        "ignored_modules": {"ignored_modules": modules},
        "modules": {"ignored_states": modules},
        "parameters": {"ignored_states": ignored},
    }
    model = FSDP(plain, sharding_strategy=strategy, use_orig_params=keep, **options[spelling])
    assert {*ignored} <= {*model.parameters()}, "the same objects"
    assert torch.equal(plain.leave.weight, reference.leave.weight)
    assert torch.equal(plain.blocks[1].linear.bias, reference.blocks[1].linear.bias)
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        reference(batch(step)).sum().backward()
        with trace.record() as recorder:
            model(batch(step)).sum().backward()
        # The unit has the layer `enter` and three blocks, each of 42 parameters.
        assert [event.num_bytes for event in recorder.events if event.kind in ("RS", "AR")] == [4 * 4 * 42]
        # Each rank has the gradient of its own batch.
        assert_close(plain.leave.weight.grad, reference.leave.weight.grad)
        assert_close(plain.blocks[1].linear.bias.grad, reference.blocks[1].linear.bias.grad)


@pytest.mark.spec("IGN-01")
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.BatchNorm1d})], ids=["one unit", "many units"])
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
@ranks(2)
def test_buffers_below_an_ignored_module_are_not_changed(argument: str, policy: Any) -> None:
    ignored, norm = nn.Sequential(nn.BatchNorm1d(6)), nn.BatchNorm1d(6)
    plain = nn.Sequential(ignored, norm).to(device()).eval()
    for tensor in (*plain.parameters(), *plain.buffers()):
        tensor.data.fill_(dist.get_rank())
    buffer = ignored[0].running_mean
    precision = MixedPrecision(buffer_dtype=torch.float64, _module_classes_to_ignore=())
    options: Any = {"auto_wrap_policy": policy, "mixed_precision": precision, argument: [ignored]}
    FSDP(plain, sync_module_states=True, **options)
    assert not norm.running_mean.any(), "the other values come from rank 0"
    assert (ignored[0].weight == dist.get_rank()).all()
    assert (buffer == dist.get_rank()).all(), "no rank has sent it"
    assert ignored[0].running_mean is buffer
    assert buffer.dtype is torch.float32, "it was not cast"


@pytest.mark.spec("IGN-01")
@pytest.mark.accelerator
@ranks(2)
def test_ignored_module_stays_on_its_own_device() -> None:
    plain = nn.Sequential(nn.Linear(6, 6, device=device()), nn.Linear(6, 6))
    model = FSDP(plain, ignored_modules=[plain[1]])
    assert model.compute_device == device()
    assert plain[1].weight.device.type == "cpu"


@pytest.mark.spec("IGN-03")
@flat_or_original
@ranks(2)
def test_a_unit_below_an_ignored_module_keeps_sharding(keep: bool) -> None:
    plain = seeded()
    for index, block in enumerate(plain.blocks):
        plain.blocks[index] = FSDP(block, use_orig_params=keep)
    model = FSDP(plain, ignored_modules=[plain.blocks], use_orig_params=keep)
    assert FSDP.fsdp_modules(model) == [model, *plain.blocks]
    with trace.record() as recorder:
        assert_trains_like(model)
    assert sorted(recorder.order("RS")) == ["RS", *(f"RS blocks.{index}" for index in range(4))]


# --- with a policy ---


@pytest.mark.spec("IGN-10")
@ranks(2)
def test_a_block_that_is_too_small_without_its_ignored_part_stays_in_the_outer_unit() -> None:
    def at_least_40(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=40)

    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device())
    bias = plain[1].bias
    model = FSDP(plain, auto_wrap_policy=at_least_40, ignored_states=[bias])
    assert [type(unit.module) for unit in FSDP.fsdp_modules(model)] == [nn.Sequential, nn.Linear]
    assert model[1].bias is bias


@pytest.mark.spec("IGN-01", "IGN-04", "IGN-10", "ORIG-16")
@flat_or_original
@ranks(2)
def test_an_ignored_parameter_may_be_tied_between_units(keep: bool) -> None:
    plain, reference = seeded(), seeded()
    for model in (plain, reference):
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
    shared, policy = plain.blocks[0].linear.weight, ModuleWrapPolicy({nn.Linear})
    # An iterator can be read only once.
    model = FSDP(plain, auto_wrap_policy=policy, ignored_states=iter([shared]), use_orig_params=keep)
    for each in (model, reference):
        each(batch()).sum().backward()
    assert [block.linear.weight is shared for block in plain.blocks] == [True, True, False, False]
    assert_close(shared.grad, reference.blocks[0].linear.weight.grad)


# --- invalid arguments ---


@pytest.mark.spec("IGN-02")
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
@ranks(2)
def test_a_wrapper_cannot_be_ignored(argument: str) -> None:
    plain = seeded()
    plain.blocks[0] = FSDP(plain.blocks[0])
    with refused(ValueError, "FullyShardedDataParallel", "remove it from the list"):
        FSDP(plain, sync_module_states=True, **{argument: [plain.blocks[0]]})
    assert isinstance(plain.leave.weight, nn.Parameter), "no value was changed"


@pytest.mark.spec("IGN-05", "IGN-06")
@ranks(2)
def test_parameters_and_modules_and_both_spellings_cannot_be_mixed() -> None:
    plain = seeded()
    for mixed in ([plain.enter.weight, plain.leave], [plain.leave, plain.enter.weight]):
        with refused(ValueError, "ignored_states", "nn.Parameter", "nn.Module", "Linear"):
            FSDP(plain, sync_module_states=True, ignored_states=mixed)
    for modules, states in (([], []), ([plain.enter], []), ([], [plain.leave]), ([plain.enter], [plain.leave])):
        with refused(ValueError, "ignored_modules", "ignored_states"):
            FSDP(plain, sync_module_states=True, ignored_modules=modules, ignored_states=states)


@pytest.mark.spec("IGN-09")
@ranks(2)
def test_ignored_modules_must_be_iterable_of_modules() -> None:
    plain, layer = seeded(), nn.Linear(2, 2)
    no_modules = [nn.Parameter(torch.ones(2)), "leave", nn.Linear, None, 3]
    for given in (layer, 3, True, "leave", {"leave": layer}, *([layer, one] for one in no_modules), [no_modules[0]]):
        with refused(TypeError, "ignored_modules"):
            FSDP(plain, sync_module_states=True, ignored_modules=given)
    assert_close(plain.state_dict(), seeded().state_dict(), rtol=0, atol=0)
    FSDP(plain, ignored_modules=[])
    FSDP(seeded(), ignored_states=[])


@pytest.mark.spec("IGN-12")
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
@ranks(2)
def test_ignoring_the_wrapped_module_itself_warns_and_leaves_nothing_to_shard(argument: str) -> None:
    plain, reference = seeded(), seeded()
    parameters = list(plain.parameters())
    with pytest.warns(UserWarning, match=rf"rank {dist.get_rank()}.*ignore.*Stack") as caught:
        model = FSDP(plain, **{argument: [plain]})
    assert len(caught) == 1
    assert all(mine is before for mine, before in zip(model.parameters(), parameters, strict=True))
    with trace.record() as recorder:
        model(batch()).sum().backward()
    assert recorder.events == []
    reference(batch()).sum().backward()
    for parameter, expected in zip(parameters, reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
