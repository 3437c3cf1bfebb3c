"""The memory that a public call needs is free when the call has returned and its result is dropped.

The garbage collector is off, because it can run much later than the memory is needed.

The model has 8 MiB in units of 2 MiB, and each of the two ranks stores half of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spec_tests import subject
from spec_tests.checkpoint import scale
from spec_tests.checkpoint.checkpoints import quiet
from spec_tests.harness import device, ranks
from spec_tests.live_bytes import LiveBytes
from spec_tests.subject import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.cpu  # `LiveBytes` counts tensors on the CPU
# Step counters, norms and flags. The smallest tensor of the model's matrices is 25 times larger.
SMALL = 20_000
WHOLE_MODEL = 4 * (8 * scale.WIDTH * scale.WIDTH + 3 * scale.WIDTH + 3)
FULL = StateDictOptions(full_state_dict=True)


def backward(model: Any) -> None:
    model(torch.ones(2, scale.WIDTH, device=device())).sum().backward()


def summon(model: Any, **options: Any) -> None:
    with FSDP.summon_full_params(model, **options):
        pass


def change_gradients(model: Any, factor: float) -> None:
    with FSDP.summon_full_params(model, with_grads=True):
        for parameter in model.parameters():
            parameter.grad = factor * parameter.grad


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, scale.WIDTH, device=device()))
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def unshard(model: Any) -> None:
    for block in model.blocks:
        block.unshard()
        block.reshard()


def reload(model: Any, optimizer: Any, options: StateDictOptions) -> None:
    weights, states = subject.get_state_dict(model, optimizer, options=options)
    subject.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


def reload_with_torch(model: Any, optimizer: Any) -> None:
    reload(model, optimizer, FULL)
    # torch's `flatten_state_dict`, which loads full states, has a local function that is a reference cycle.
    gc.collect()


def reload_optimizer(model: Any, optimizer: Any) -> None:
    states = FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))


Call = Callable[[Any, torch.optim.Optimizer], Any]
OF_BOTH: dict[str, Call] = {
    "forward without gradients": lambda model, _: evaluate(model),
    "backward": lambda model, _: backward(model),
    "state_dict": lambda model, _: model.state_dict(),
    "load_state_dict": lambda model, _: model.load_state_dict(model.state_dict()),
    "set_state_dict, full": lambda model, optimizer: reload(model, optimizer, FULL),
    "set_state_dict, sharded": lambda model, optimizer: reload(model, optimizer, StateDictOptions()),
}
OF_THE_WRAPPER: dict[str, Call] = {
    "summon_full_params": lambda model, _: summon(model),
    "summon_full_params, without writeback": lambda model, _: summon(model, writeback=False),
    "summon_full_params, rank 0 on the CPU": lambda model, _: summon(
        model, writeback=False, rank0_only=True, offload_to_cpu=True
    ),
    "clip_grad_norm_": lambda model, _: model.clip_grad_norm_(0.1),
    "optim_state_dict_to_load": reload_optimizer,
    "full_optim_state_dict": lambda model, optimizer: FSDP.full_optim_state_dict(model, optimizer),
}
OF_ORIGINAL_PARAMETERS: dict[str, Call] = {
    "summon_full_params, with gradients": lambda model, _: summon(model, with_grads=True),
    "summon_full_params, new gradients": lambda model, _: change_gradients(model, 2.0),
}
OF_FULLY_SHARD: dict[str, Call] = {
    "set_state_dict, full": reload_with_torch,
    "unshard and reshard": lambda model, _: unshard(model),
    "clip_grad_norm_": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
}
CALLS = {
    "flat": OF_BOTH | OF_THE_WRAPPER,
    "original": OF_BOTH | OF_THE_WRAPPER | OF_ORIGINAL_PARAMETERS,
    "fully_shard": OF_BOTH | OF_FULLY_SHARD,
}


@pytest.mark.spec("COST-22")
@pytest.mark.parametrize("api", scale.APIS)
@ranks(2)
def test_sharding_and_a_step_leave_no_tensor_to_the_garbage_collector(api: str) -> None:
    gc.collect()
    gc.disable()
    with quiet(), LiveBytes() as live:
        model, optimizer = scale.trained(api)
        before = live.now()
        gc.enable()
        gc.collect()
        assert live.now() == before
    assert optimizer.state
    assert [*model.parameters()]


@pytest.mark.spec("SHARD-06", "SUMMON-06", "SUMMON-15", "SCALE-04", "COST-22")
@pytest.mark.parametrize("api", scale.APIS)
@ranks(2)
def test_no_memory_of_a_call_outlives_it(api: str) -> None:
    for name, call in CALLS[api].items():
        with quiet(), LiveBytes() as live:
            model, optimizer = scale.trained(api)
            backward(model)
            before = live.now()
            gc.disable()
            call(model, optimizer)
            gc.enable()
            assert live.now() == pytest.approx(before, abs=SMALL), name


@pytest.mark.spec("SUMMON-06")
@pytest.mark.parametrize("api", ["flat", "original"])
@ranks(2)
def test_summoned_parameters_need_the_memory_of_the_model_once(api: str) -> None:
    with quiet(), LiveBytes() as live:
        model, _ = scale.trained(api)
        before = live.now()
        live.forget_peak()
        with FSDP.summon_full_params(model):
            assert live.now() - before == pytest.approx(WHOLE_MODEL, abs=SMALL)
        assert live.peak - before == pytest.approx(WHOLE_MODEL, abs=SMALL)


@pytest.mark.spec("CLIP-03")
@pytest.mark.parametrize("api", scale.APIS)
@ranks(2)
def test_clipping_copies_no_gradient(api: str) -> None:
    with quiet(), LiveBytes() as live:
        model, optimizer = scale.trained(api)
        backward(model)
        before = live.now()
        live.forget_peak()
        CALLS[api]["clip_grad_norm_"](model, optimizer)
        assert live.peak - before < SMALL
