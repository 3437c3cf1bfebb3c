"""Calls that only minifsdp has, or that torch's FSDPs cannot do on a CPU, inside modes of torch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullStateDictConfig, StateDictType, debug, explain, token_scale, trace, while_all_have_data
from minifsdp import FullyShardedDataParallel as FSDP
from spec_tests.harness import ranks
from spec_tests.models import apis
from spec_tests.modes.test_calls_in_modes import MODES, Net, Run, assert_equal

pytestmark = pytest.mark.cpu
# One of each kind; the other module tests all modes.
SOME_MODES = ("inference_mode", "default dtype bfloat16", "default device meta", "deterministic", "dispatch mode")
some_modes = pytest.mark.parametrize("mode", SOME_MODES)


@pytest.mark.spec("PAR-10")
@apis.wrapper_apis
@pytest.mark.parametrize("steps", [0, 1])
@some_modes
@ranks(2)
def test_full_values_on_the_first_rank_in_a_mode(api: apis.Api, mode: str, steps: int) -> None:
    run, plain = (Run(one, MODES[mode], steps) for one in (api, None))
    with run.mode(), FSDP.summon_full_params(run.model, rank0_only=True, writeback=False, offload_to_cpu=True):
        if dist.get_rank() == 0:
            assert_equal(dict(run.model.named_parameters()), plain.values())
    form = StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with run.mode(), FSDP.state_dict_type(run.model, *form):
        state = run.model.state_dict()
    assert_equal(state, plain.model.state_dict() if dist.get_rank() == 0 else {})
    run.train()


@pytest.mark.spec("PAR-10")
@apis.wrapper_apis
@pytest.mark.parametrize("form", ["FULL", "SHARDED"])
@some_modes
@ranks(2)
def test_optimizer_states_in_a_mode(api: apis.Api, form: str, mode: str) -> None:
    run, plain = (Run(one, MODES[mode], steps=1) for one in (api, None))
    with FSDP.state_dict_type(run.model, StateDictType[f"{form}_STATE_DICT"]), run.mode():
        states = FSDP.optim_state_dict(run.model, run.optimizer)
        loadable = FSDP.optim_state_dict_to_load(run.model, run.optimizer, states)
        run.optimizer.load_state_dict(loadable)
    run.train()
    plain.train()
    assert_equal(run.values(), plain.values())


@pytest.mark.spec("PAR-10")
@apis.wrapper_apis
@some_modes
@ranks(2)
def test_broadcast_of_initial_values_in_a_mode(api: apis.Api, mode: str) -> None:
    run, model = Run(api, MODES[mode]), Net()
    for parameter in model.parameters():
        nn.init.constant_(parameter, dist.get_rank())
    with run.mode():
        run.model = run.sharded(model, sync_module_states=True)
    assert not any(value.any() for value in run.values().values())


@pytest.mark.spec("PAR-10")
@apis.all_apis
@some_modes
@ranks(2)
def test_checks_and_records_in_a_mode(api: apis.Api, mode: str) -> None:
    with debug():
        run = Run(api, MODES[mode], inside=MODES[mode])
        with run.mode(), trace.record() as recorder:
            loss = run.loss()
            assert "first" in str(explain(run.model))
            if loss.requires_grad:
                loss.float().backward()
    assert recorder.order("AG")


@pytest.mark.spec("PAR-10")
@ranks(2)
def test_batches_and_tokens_in_a_mode() -> None:
    for mode in MODES:
        with MODES[mode]():
            batches = list(while_all_have_data([1, 2, 3][: 2 + dist.get_rank()]))
            scale = token_scale(2 + 4 * dist.get_rank())
        assert batches == [1, 2], mode
        assert (scale.device.type, scale.dtype, scale.item()) == ("cpu", torch.float32, 0.25), mode


def summon(run: Run) -> None:
    with FSDP.summon_full_params(run.model):
        pass


# The state dicts and the clipping of `fully_shard` are operations of torch on DTensors.
WRAPPER_CALLS: list[Callable[[Run], object]] = [
    lambda run: run.model(run.x),
    lambda run: run.model.state_dict(),
    lambda run: run.model.clip_grad_norm_(1.0),
    summon,
]
FULLY_SHARD_CALLS: list[Callable[[Run], object]] = [
    lambda run: run.model(run.x),
    lambda run: run.model.first.unshard(),
]


@pytest.mark.spec("PAR-11")
@apis.all_apis
@pytest.mark.parametrize("steps", [0, 1])
@ranks(2)
def test_a_call_with_fake_tensors_raises_an_error(api: apis.Api, steps: int) -> None:
    for call in FULLY_SHARD_CALLS if api == apis.FULLY_SHARD else WRAPPER_CALLS:
        run, plain = (Run(one, contextlib.nullcontext, steps) for one in (api, None))
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="FakeTensorMode"):
            call(run)
        run.train()
        plain.train()
        assert_equal(run.values(), plain.values())


@pytest.mark.spec("PAR-11")
@apis.all_apis
@pytest.mark.parametrize("is_active", [True, False], ids=["inside of the mode", "outside of the mode"])
@ranks(2)
def test_a_forward_of_fake_parameters_raises_an_error(api: apis.Api, is_active: bool) -> None:
    run = Run(api, contextlib.nullcontext)
    options = {"mesh": init_device_mesh("cpu", (2,))} if api == apis.FULLY_SHARD else {}
    with warnings.catch_warnings():
        # torch warns if the address of a fake tensor is read.
        warnings.simplefilter("ignore")
        with FakeTensorMode() as mode:
            model, x = run.sharded(Net(), **options), torch.ones(2, 4)
        with mode if is_active else contextlib.nullcontext(), pytest.raises(RuntimeError, match="FakeTensorMode"):
            model(x)
    run.train()
