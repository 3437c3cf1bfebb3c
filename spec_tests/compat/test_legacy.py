"""Old spellings. Each one works and warns once."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from minifsdp import checkpoint_wrapper
from spec_tests import subject
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import Block, seeded
from spec_tests.models.sharding import wrapped
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, trace

POLICY = ModuleWrapPolicy({nn.Linear})


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device())


@pytest.mark.spec("LEGACY-01")
@ranks(2)
def test_the_old_keyword_of_the_policy_means_the_new_one_and_warns_once() -> None:
    with pytest.warns(FutureWarning, match="fsdp_auto_wrap_policy=.*auto_wrap_policy=") as caught:
        model = FSDP(two_layers(), fsdp_auto_wrap_policy=POLICY)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning names the line that must be changed"
    assert len(FSDP.fsdp_modules(model)) == 3


@pytest.mark.spec("LEGACY-01")
@ranks(2)
def test_the_old_and_the_new_keyword_together_are_refused() -> None:
    with refused(TypeError, "fsdp_auto_wrap_policy", "auto_wrap_policy"):
        FSDP(two_layers(), fsdp_auto_wrap_policy=POLICY, auto_wrap_policy=POLICY)


@pytest.mark.spec("LEGACY-04")
@ranks(2)
def test_offload_as_third_argument_is_refused_with_the_keyword_to_use() -> None:
    with refused(TypeError, "CPUOffload", "cpu_offload="):
        FSDP(two_layers(), None, subject.CPUOffload(offload_params=True))  # type: ignore[arg-type]


@pytest.mark.spec("NAMES-09")
@ranks(2)
def test_params_with_grad_lists_parameters_with_a_gradient_and_warns() -> None:
    model = FSDP(two_layers(), auto_wrap_policy=POLICY)
    with pytest.warns(FutureWarning, match="params_with_grad"):
        assert model.params_with_grad == []
    model.module[0](torch.ones(2, 3)).sum().backward()
    with pytest.warns(FutureWarning, match="params_with_grad"):
        found = model.params_with_grad
    assert [id(p) for p in found] == [id(p) for p in model.module[0].parameters()]


@pytest.mark.spec("LEGACY-09", "LEGACY-10")
@ranks(2)
def test_short_calls_of_1_13_need_no_new_argument() -> None:
    model = FSDP(two_layers())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FSDP.summon_full_params(model, True, False):
            assert model.module[0].weight.shape == (3, 3)
        warnings.filterwarnings("ignore", ".*are deprecated, as in torch", FutureWarning)
        with FSDP.state_dict_type(model, subject.StateDictType.FULL_STATE_DICT, subject.FullStateDictConfig()):
            assert model.state_dict()["0.weight"].shape == (3, 3)


# --- 1.13 ---


@pytest.mark.spec("LEGACY-05")
@ranks(2)
def test_the_constructor_of_1_13_is_a_prefix_and_positional_calls_keep_their_meaning() -> None:
    plain, seen = seeded(), []
    group, precision, ignored = dist.group.WORLD, subject.MixedPrecision(reduce_dtype=torch.float64), [plain.leave]
    strategy, offload = subject.ShardingStrategy.SHARD_GRAD_OP, subject.CPUOffload(True)
    after = subject.BackwardPrefetch.BACKWARD_POST
    policy = ModuleWrapPolicy({Block})
    with trace.record() as recorder:
        model = FSDP(plain, group, strategy, offload, policy, after, precision, ignored, seen.append, device(), True)
    for wrapper in FSDP.fsdp_modules(model):
        assert (wrapper.process_group, wrapper.sharding_strategy, wrapper.cpu_offload) == (group, strategy, offload)
        assert (wrapper.backward_prefetch, wrapper.mixed_precision) == (after, precision)
        assert wrapper.compute_device == device()
    assert len(FSDP.fsdp_modules(model)) == 5
    assert isinstance(plain.leave.weight, nn.Parameter), "ignored"
    assert recorder.count("BCAST") == 5
    assert seen == [], "nothing was on the meta device"


@pytest.mark.spec("LEGACY-08", "MP-19", "MP-21")
@pytest.mark.parametrize("ignored", [None, ()], ids=["as in 1.13", "none"])
@ranks(2)
def test_legacy_mixed_precision_excludes_batch_norms_by_default(ignored: Any) -> None:
    low, seen = torch.bfloat16, []
    precision = subject.MixedPrecision(low)
    if ignored is not None:
        # On the CPU, a batch norm in low precision also needs its statistics in low precision.
        precision = subject.MixedPrecision(low, buffer_dtype=low, _module_classes_to_ignore=ignored)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device())
    for layer in plain:
        layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    warns = pytest.warns(UserWarning, match="BatchNorm1d") if ignored is None else contextlib.nullcontext()
    with warns:
        model = FSDP(nn.Sequential(plain), mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({type(plain)}))
    model(torch.randn(4, 3))
    assert seen == [low, torch.float32 if ignored is None else low]


@pytest.mark.spec("LEGACY-13", "CLIP-05", "CLIP-06")
@pytest.mark.parametrize("strategy", [subject.ShardingStrategy.NO_SHARD, subject.ShardingStrategy.FULL_SHARD])
@ranks(2)
def test_norm_of_torch_is_correct_only_without_sharding(strategy: Any) -> None:
    model = wrapped(sharding_strategy=strategy)
    model(torch.ones(2, 6, device=device())).sum().backward()
    of_utility = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    of_method = model.clip_grad_norm_(1e9)
    is_right = torch.isclose(of_utility, of_method, rtol=1e-5)
    assert bool(is_right) is (strategy is subject.ShardingStrategy.NO_SHARD)


# --- the 2022 tutorial ---


@pytest.mark.spec("LEGACY-15", "PAR-07")
@ranks(2)
def test_old_name_of_activation_checkpointing_works_and_warns() -> None:
    model = wrapped()
    with pytest.warns(FutureWarning, match=r"apply_activation_checkpointing_wrapper .*apply_activation_checkp") as seen:
        checkpoint_wrapper.apply_activation_checkpointing_wrapper(
            model,
            checkpoint_wrapper_fn=checkpoint_wrapper.checkpoint_wrapper,
            check_fn=lambda module: isinstance(module, Block),
        )
    assert [warning.filename for warning in seen] == [__file__]
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 4
    assert_trains_like(model)
