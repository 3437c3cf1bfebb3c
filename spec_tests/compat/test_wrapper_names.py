"""Private attributes of torch's wrapper that frameworks read, with both torch and minifsdp."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as helpers
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback

import minifsdp
from minifsdp.engine.unit import State
from spec_tests.harness import device, ranks
from spec_tests.models.modules import Block, Stack, seeded
from spec_tests.models.running import batch, iterate
from spec_tests.models.sharding import as_torch, wrapped
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullStateDictConfig, FullyShardedDataParallel, MixedPrecision, StateDictType

NARROW = torch.bfloat16
KINDS = (FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel)


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


def trained(model: nn.Module) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return [trained_once(model, optimizer, step) for step in range(3)]


def trained_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> float:
    loss = iterate(model, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@ranks(2)
def check_widened(use_orig_params: bool) -> None:
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    model = wrapped(seeded().to(NARROW), mixed_precision=MixedPrecision(NARROW, NARROW, NARROW), **options)
    oracle = as_torch(seeded().to(NARROW), mixed_precision=torch_fsdp.MixedPrecision(NARROW, NARROW, NARROW), **options)
    names = widen(FullyShardedDataParallel.fsdp_modules(model))
    assert names == widen(torch_fsdp.FullyShardedDataParallel.fsdp_modules(oracle))
    assert len(names) == 5
    assert trained(model) == trained(oracle)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with FullyShardedDataParallel.summon_full_params(model):
        ours = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch_fsdp.FullyShardedDataParallel.summon_full_params(oracle):
        theirs = {
            name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in oracle.named_parameters()
        }
    assert {p.dtype for p in ours.values()} == {torch.float32}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("NAMES-08", "ORIG-01")
def test_frameworks_widen_a_model_that_was_loaded_in_bfloat16(use_orig_params: bool) -> None:
    check_widened(use_orig_params=use_orig_params)


@ranks(2)
def check_values_arrive(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    inner = FullyShardedDataParallel.fsdp_modules(model)[1]
    before = inner._flat_param.data.clone()
    inner._flat_param.data = 2 * before
    assert torch.equal(inner._flat_param.data, 2 * before)
    with FullyShardedDataParallel.summon_full_params(inner), torch.no_grad():
        plain = dict(next(m for m in seeded().modules() if isinstance(m, Block)).named_parameters())
        assert all(torch.equal(p, 2 * plain[name]) for name, p in inner.named_parameters())


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_values_that_are_assigned_to_the_slice_reach_the_parameters(use_orig_params: bool) -> None:
    check_values_arrive(use_orig_params=use_orig_params)


@ranks(2)
def check_without_parameters() -> None:
    model = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2, device=device())), nn.ReLU())
    )
    assert not model._has_params
    assert model._flat_param is None
    assert model._handle is None
    assert model[0]._has_params
    assert model.params == []
    assert len(model[0].params) == 1


def test_wrapper_without_params_does_not_list_inner_ones() -> None:
    check_without_parameters()


@ranks(2)
def check_marks() -> None:
    for flat in wrapped().parameters():
        assert getattr(flat, "_fsdp_flattened", False)
        assert getattr(flat, "_is_flat_param", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = wrapped(use_orig_params=True)
    assert not any(getattr(p, "_is_flat_param", False) for p in kept.parameters())


def test_optimizer_params_are_marked_as_flat() -> None:
    check_marks()


@ranks(2)
def check_params(use_orig_params: bool) -> None:
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
    for either in (model, oracle):
        iterate(either)
    assert [w._is_root for w in wrappers[0]] == [w._is_root for w in wrappers[1]] == [True] + [False] * 4


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("NAMES-11")
def test_wrapper_lists_flat_param_and_root_flag(use_orig_params: bool) -> None:
    check_params(use_orig_params=use_orig_params)


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


# --- the functions of torch.distributed.checkpoint.state_dict ---

FORMS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "on rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@ranks(2)
def check_model_part(use_orig_params: bool, form: str) -> None:
    options = FORMS[form]
    model = wrapped(use_orig_params=use_orig_params)
    state = helpers.get_model_state_dict(model, options=options)
    whole = seeded().state_dict()
    if form == "sharded":
        assert {type(value) for value in state.values()} == {ShardedTensor}
    elif form == "full" or dist.get_rank() == 0:
        assert list(state) == list(whole)
        assert all(torch.equal(state[name], whole[name]) for name in whole)
    else:
        assert state == {}
    # The call has restored the previous settings.
    assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_type is StateDictType.FULL_STATE_DICT
    if form != "on rank 0":
        other = wrapped(Stack().to(device()), use_orig_params=use_orig_params)
        helpers.set_model_state_dict(other, state, options=options)
        assert_same(full_values(other), full_values(model), bitwise=True)


@pytest.mark.spec("SD-CFG-02", "SD-CFG-04")
@ranks(2)
def test_assigned_state_dict_type_has_its_default_configurations() -> None:
    model: Any = wrapped()
    chosen = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, chosen)
    for form in (torch_fsdp.StateDictType.SHARDED_STATE_DICT, torch_fsdp.StateDictType.FULL_STATE_DICT):
        for wrapper in FullyShardedDataParallel.fsdp_modules(model):
            wrapper._state_dict_type = form
        found = FullyShardedDataParallel.get_state_dict_type(model)
        other: Any = wrapped()
        FullyShardedDataParallel.set_state_dict_type(other, StateDictType[form.name])
        assert found == FullyShardedDataParallel.get_state_dict_type(other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.spec("SD-CFG-02")
def test_torchs_checkpoint_functions_write_and_read_the_model(use_orig_params: bool, form: str) -> None:
    check_model_part(use_orig_params=use_orig_params, form=form)


@ranks(2)
def check_optimizer_part_is_refused(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters())
    trained_once(model, optimizer)
    with pytest.raises(AttributeError, match=rf"rank {dist.get_rank()}: .*FullyShardedDataParallel.optim_state_dict"):
        helpers.get_optimizer_state_dict(model, optimizer)
    trained_once(model, optimizer)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_optimizer_state_dict_helper_of_torch_is_refused_with_remedy(use_orig_params: bool) -> None:
    check_optimizer_part_is_refused(use_orig_params=use_orig_params)


@ranks(2)
def check_in_the_place_of_torchs_names(use_orig_params: bool, full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)
    with pytest.MonkeyPatch.context() as patch:
        for name in minifsdp.__all__:
            if hasattr(helpers, name):
                patch.setattr(helpers, name, getattr(minifsdp, name))
        patch.setattr(helpers, "FSDP", FullyShardedDataParallel)
        model = wrapped(use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        trained_once(model, optimizer)
        state = copy.deepcopy(helpers.get_state_dict(model, optimizer, options=options))
        expected = [trained_once(model, optimizer, step) for step in (1, 2)]
        resumed = wrapped(Stack().to(device()), use_orig_params=use_orig_params)
        fresh = torch.optim.Adam(resumed.parameters(), lr=1e-3)
        helpers.set_state_dict(resumed, fresh, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    assert [trained_once(resumed, fresh, step) for step in (1, 2)] == expected
    assert_same(full_values(resumed), full_values(model), bitwise=True)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("OSD-01", "OSD-LOAD-01")
def test_training_resumes_with_these_names_in_place_of_those_of_torch(use_orig_params: bool, full: bool) -> None:
    check_in_the_place_of_torchs_names(use_orig_params=use_orig_params, full=full)


# --- gradient synchronization, and the end of a backward that fails ---


@ranks(2)
def check_sync_gradients(use_orig_params: bool) -> None:
    model, oracle = (make(seeded(), use_orig_params=use_orig_params) for make in (wrapped, as_torch))
    wrappers = [kind.fsdp_modules(m) for kind, m in zip(KINDS, (model, oracle), strict=True)]

    def both() -> list[list[bool]]:
        return [[wrapper._sync_gradients for wrapper in of_one] for of_one in wrappers]

    assert both() == [[True] * len(wrappers[0])] * 2
    with model.no_sync(), oracle.no_sync():
        assert both() == [[False] * len(wrappers[0])] * 2
    assert both() == [[True] * len(wrappers[0])] * 2
    with pytest.raises(AttributeError, match="_sync_gradients"):
        model._sync_gradients = False


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("START-08")
def test_wrapper_has_gradient_sync_flag(use_orig_params: bool) -> None:
    check_sync_gradients(use_orig_params=use_orig_params)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("START-08")
@ranks(2)
def test_wrapper_without_parameters_of_its_own_has_gradient_sync_flag(use_orig_params: bool) -> None:
    model, oracle = (
        make(nn.Sequential(Block(), Block()), use_orig_params=use_orig_params) for make in (wrapped, as_torch)
    )
    for either in (model, oracle):
        either(batch())
        with either.no_sync():
            assert not either._sync_gradients
        assert either._sync_gradients


class OutOfMemoryError(RuntimeError):
    """A hook raises this exception to simulate a failed allocation."""


@ranks(2)
def check_retry(use_orig_params: bool, clears_first: bool) -> None:
    model, oracle = (wrapped(seeded(), use_orig_params=use_orig_params) for _ in range(2))
    for either in (model, oracle):
        optimizer = torch.optim.Adam(either.parameters(), lr=1e-2)
        trained_once(either, optimizer)
        if either is model:
            fail_in_backward(model, clears_first)
            assert all(parameter.grad is None for parameter in model.parameters())
        trained_once(either, optimizer, 1)
    assert_same(full_values(model), full_values(oracle), bitwise=True)


def fail_in_backward(model: Any, clears_first: bool) -> None:
    """Runs a backward that raises on all ranks, and then the steps that Composer takes after an error.

    With ``clears_first``, ``zero_grad()`` is the first of them. It also resets the units.
    """

    def fail(*_: Any) -> None:
        raise OutOfMemoryError("CUDA out of memory")

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    handle = blocks[0].register_full_backward_hook(fail)
    with pytest.raises(OutOfMemoryError):
        iterate(model, 7)
    handle.remove()
    if clears_first:
        model.zero_grad(set_to_none=True)
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        if wrapper.check_is_root():
            _post_backward_final_callback(wrapper, wrapper)
    assert all(unit.state is State.SHARDED for unit in model._root_state.units)
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("START-09")
def test_final_callback_of_torch_ends_a_failed_backward(use_orig_params: bool, clears_first: bool) -> None:
    check_retry(use_orig_params=use_orig_params, clears_first=clears_first)
