"""Calls that only minifsdp has, or that torch's FSDPs cannot do on a CPU, inside modes of torch."""

from __future__ import annotations

import contextlib
import copy
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
from spec_tests.models.apis import FULLY_SHARD, Api, all_apis, wrapper_apis
from spec_tests.modes.test_calls_in_modes import MODES, Net, Pair, same

pytestmark = pytest.mark.cpu


@pytest.mark.spec("PAR-10")
@wrapper_apis
@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_full_values_on_the_first_rank_in_a_mode(api: Api, mode: str) -> None:
    for steps in (0, 1):
        pair = Pair(api, MODES[mode], steps)
        with pair.mode(), FSDP.summon_full_params(pair.model, rank0_only=True, writeback=False, offload_to_cpu=True):
            if dist.get_rank() == 0:
                same(dict(pair.model.named_parameters()), dict(pair.plain.named_parameters()))
        form = StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with pair.mode(), FSDP.state_dict_type(pair.model, *form):
            state = pair.model.state_dict()
        same(state, pair.plain.state_dict() if dist.get_rank() == 0 else {})
        pair.train()
        pair.check()


@pytest.mark.spec("PAR-10")
@wrapper_apis
@pytest.mark.parametrize("form", ["FULL", "SHARDED"])
@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_optimizer_states_in_a_mode(api: Api, form: str, mode: str) -> None:
    pair = Pair(api, MODES[mode], 1)
    with FSDP.state_dict_type(pair.model, StateDictType[f"{form}_STATE_DICT"]), pair.mode():
        states = FSDP.optim_state_dict(pair.model, pair.optimizer)
        loadable = FSDP.optim_state_dict_to_load(pair.model, pair.optimizer, states)
        pair.optimizer.load_state_dict(loadable)
    pair.train()
    pair.check()


@pytest.mark.spec("PAR-10")
@wrapper_apis
@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_broadcast_of_initial_values_in_a_mode(api: Api, mode: str) -> None:
    pair = Pair(api, MODES[mode], 0)
    model = copy.deepcopy(pair.plain)
    for parameter in model.parameters():
        nn.init.constant_(parameter, dist.get_rank())
    with pair.mode():
        pair.model = pair.sharded(model, sync_module_states=True)
    for parameter in pair.plain.parameters():
        nn.init.constant_(parameter, 0)
    pair.check()


@pytest.mark.spec("PAR-10")
@all_apis
@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_checks_and_records_in_a_mode(api: Api, mode: str) -> None:
    pair = Pair(api, MODES[mode], 0)
    with debug():
        model = copy.deepcopy(pair.plain)
        with pair.mode(), trace.record() as recorder:
            pair.model = pair.sharded(model)
            output = pair.model(pair.x)
            assert "first" in str(explain(pair.model))
        assert recorder.order("AG")
        if output.requires_grad:
            with pair.mode():
                output.float().sum().backward()


@pytest.mark.spec("PAR-10")
@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_batches_and_tokens_in_a_mode(mode: str) -> None:
    with MODES[mode]():
        batches = list(while_all_have_data([1, 2, 3][: 2 + dist.get_rank()]))
        scale = token_scale(2 + 4 * dist.get_rank())
    assert batches == [1, 2]
    assert (scale.device.type, scale.dtype, scale.item()) == ("cpu", torch.float32, 0.25)


def forward(pair: Pair) -> None:
    pair.model(pair.x)


def full_values(pair: Pair) -> None:
    if pair.api == FULLY_SHARD:
        pair.model.first.unshard()
    else:
        with FSDP.summon_full_params(pair.model):
            pass


def state_dict(pair: Pair) -> None:
    if pair.api == FULLY_SHARD:
        forward(pair)
    else:
        pair.model.state_dict()


def clip(pair: Pair) -> None:
    if pair.api == FULLY_SHARD:
        forward(pair)
    else:
        pair.model.clip_grad_norm_(1.0)


@pytest.mark.spec("PAR-11")
@all_apis
@pytest.mark.parametrize("call", [forward, full_values, state_dict, clip], ids=lambda call: call.__name__)
@pytest.mark.parametrize("steps", [0, 1])
@ranks(2)
def test_a_call_with_fake_tensors_raises_an_error(api: Api, call: Callable[[Pair], None], steps: int) -> None:
    pair = Pair(api, contextlib.nullcontext, steps)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="FakeTensorMode"):
        call(pair)
    pair.train()
    pair.check()


@pytest.mark.spec("PAR-11")
@all_apis
@pytest.mark.parametrize("is_active", [True, False], ids=["inside of the mode", "outside of the mode"])
@ranks(2)
def test_a_forward_of_fake_parameters_raises_an_error(api: Api, is_active: bool) -> None:
    pair = Pair(api, contextlib.nullcontext, 0)
    options = {"mesh": init_device_mesh("cpu", (2,))} if api == FULLY_SHARD else {}
    with warnings.catch_warnings():
        # torch warns if the address of a fake tensor is read.
        warnings.simplefilter("ignore")
        with FakeTensorMode() as mode:
            model, x = pair.sharded(Net(), **options), torch.ones(2, 4)
        with mode if is_active else contextlib.nullcontext(), pytest.raises(RuntimeError, match="FakeTensorMode"):
            model(x)
    pair.train()
    pair.check()
