"""Private attributes of torch's wrapper that frameworks read, with both torch and minifsdp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback

from minifsdp.engine.unit import State
from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import Block, seeded
from spec_tests.models.running import iterate
from spec_tests.models.sharding import as_torch, wrapped
from spec_tests.subject import FullStateDictConfig, FullyShardedDataParallel, MixedPrecision, StateDictType

NARROW = torch.bfloat16
KINDS = (FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel)
flat_or_original = pytest.mark.parametrize("use_orig_params", [False, True])


def widen(wrappers: list[Any]) -> list[tuple[str, ...]]:
    """Prepares wrappers for mixed precision as Accelerate does. Returns the names that Accelerate would print."""
    widened = []
    for wrapper in wrappers:
        if not wrapper._has_params:
            continue
        row = wrapper._flat_param
        if row.dtype != torch.float32 and row.device.type != "meta" and row.requires_grad:
            widened.append(tuple(row._fqns))
            row.data = row.data.to(torch.float32)
            wrapper._handle._orig_param_dtype = torch.float32
    return widened


@flat_or_original
@pytest.mark.spec("NAMES-08", "ORIG-01")
@ranks(2)
def test_frameworks_widen_a_model_that_was_loaded_in_bfloat16(use_orig_params: bool) -> None:
    low = MixedPrecision(NARROW, NARROW, NARROW), torch_fsdp.MixedPrecision(NARROW, NARROW, NARROW)
    model, oracle = (
        shard(seeded().to(NARROW), mixed_precision=precision, use_orig_params=use_orig_params)
        for shard, precision in zip((wrapped, as_torch), low, strict=True)
    )
    names, expected = (widen(kind.fsdp_modules(m)) for kind, m in zip(KINDS, (model, oracle), strict=True))
    assert names == expected
    assert len(names) == 5
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (model, oracle)]
    for step in range(3):
        assert iterate(model, step, optimizers[0]) == iterate(oracle, step, optimizers[1])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch_fsdp.FullyShardedDataParallel.summon_full_params(oracle):
        torch.testing.assert_close(model.state_dict(), oracle.module.state_dict(), rtol=0.0, atol=0.0)


@flat_or_original
@ranks(2)
def test_values_that_are_assigned_to_the_slice_reach_the_parameters(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    inner = FullyShardedDataParallel.fsdp_modules(model)[1]
    inner._flat_param.data = 2 * inner._flat_param.data
    expected = {name: 2 * value for name, value in seeded().blocks[0].state_dict().items()}
    torch.testing.assert_close(dict(inner.state_dict()), expected, rtol=0.0, atol=0.0)


@ranks(2)
def test_wrapper_without_params_does_not_list_inner_ones() -> None:
    model = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2, device=device())), nn.ReLU())
    )
    assert (model._has_params, model._flat_param, model._handle, model.params) == (False, None, None, [])
    assert model[0]._has_params
    assert len(model[0].params) == 1


@pytest.mark.spec("NAMES-11")
@flat_or_original
@ranks(2)
def test_wrapper_lists_flat_param_and_root_flag(use_orig_params: bool) -> None:
    model, oracle = (make(seeded(), use_orig_params=use_orig_params) for make in (wrapped, as_torch))
    wrappers = [kind.fsdp_modules(m) for kind, m in zip(KINDS, (model, oracle), strict=True)]
    for wrapper, other in zip(*wrappers, strict=True):
        (mine,), (theirs,) = wrapper.params, other.params
        assert (mine.numel(), mine.shape) == (mine.data.numel(), mine.data.shape)
        if not use_orig_params:
            # With original parameters, torch's flat parameter has gaps.
            assert torch.equal(mine.data, theirs.data)
        assert isinstance(mine, nn.Parameter) is not use_orig_params
        assert wrapper._is_root is other._is_root is None
    for parameter in model.parameters():
        assert getattr(parameter, "_is_flat_param", False) is not use_orig_params
        assert use_orig_params or parameter._fsdp_flattened
    for either in (model, oracle):
        iterate(either)
    assert [w._is_root for w in wrappers[0]] == [w._is_root for w in wrappers[1]] == [True] + [False] * 4


@pytest.mark.spec("NAMES-11")
@ranks(2)
def test_state_registry_contains_only_wrappers() -> None:
    wrapper = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2, device=device())))
    assert _get_module_state(wrapper) is wrapper
    assert _get_module_state(wrapper.module) is None


@pytest.mark.spec("NAMES-11")
@ranks(2)
def test_unrelated_attribute_error_of_a_slice_does_not_mention_optimizer_states() -> None:
    wrapper = FullyShardedDataParallel(nn.Linear(2, 2, device=device()), use_orig_params=True)
    with pytest.raises(AttributeError, match=r"no attribute 'grad'.*use_orig_params=False") as error:
        _ = wrapper._flat_param.grad
    assert "optim" not in str(error.value)
    assert not hasattr(wrapper._handle, "is_sharded")


@pytest.mark.spec("SD-CFG-02", "SD-CFG-04")
@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@ranks(2)
def test_assigned_state_dict_type_has_its_default_configurations(form: str) -> None:
    model, other = wrapped(), wrapped()
    chosen = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, chosen)
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        wrapper._state_dict_type = torch_fsdp.StateDictType[form]
    FullyShardedDataParallel.set_state_dict_type(other, StateDictType[form])
    found, expected = (FullyShardedDataParallel.get_state_dict_type(each) for each in (model, other))
    assert found == expected


# --- gradient synchronization, and the end of a backward that fails ---


@pytest.mark.spec("START-08")
@pytest.mark.parametrize("has_parameters", [False, True])
@flat_or_original
@ranks(2)
def test_wrapper_has_gradient_sync_flag(use_orig_params: bool, has_parameters: bool) -> None:
    for kind, shard in zip(KINDS, (wrapped, as_torch), strict=True):
        plain = seeded() if has_parameters else nn.Sequential(Block(), Block())
        model = shard(plain, use_orig_params=use_orig_params)
        model(torch.ones(1, 6, device=device()))
        wrappers = kind.fsdp_modules(model)
        assert all(wrapper._sync_gradients for wrapper in wrappers)
        with model.no_sync():
            assert not any(wrapper._sync_gradients for wrapper in wrappers)
        assert all(wrapper._sync_gradients for wrapper in wrappers)
        if shard is wrapped:
            with pytest.raises(AttributeError, match="_sync_gradients"):
                model._sync_gradients = False


@pytest.mark.spec("START-09")
@pytest.mark.parametrize("clears_first", [True, False])
@flat_or_original
@ranks(2)
def test_final_callback_of_torch_ends_a_failed_backward(use_orig_params: bool, clears_first: bool) -> None:
    """Composer calls it after an error. If ``zero_grad()`` comes first, it also resets the units."""

    def fail(*_: Any) -> None:
        raise MemoryError("CUDA out of memory")

    model, plain = wrapped(use_orig_params=use_orig_params), seeded()
    assert_trains_like(model, plain)
    handle = model.module.blocks[0].module.register_full_backward_hook(fail)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        iterate(model, 7)
    handle.remove()
    if clears_first:
        model.zero_grad(set_to_none=True)
    _post_backward_final_callback(model, model)
    assert all(unit.state is State.SHARDED for unit in model._root_state.units)
    model.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_trains_like(model, plain, [1])
