"""Calls of the public API inside modes of torch that change how tensors are created or recorded.

A test enters a mode around one call, before the first step and after it. Then the model trains one step without the
mode. Both must have the results of the plain model, to which the test does the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, Api, all_apis
from spec_tests.models.values import full
from spec_tests.subject import (
    ENGINE,
    FullyShardedDataParallel,
    ShardedGradScaler,
    get_state_dict,
    set_state_dict,
)

pytestmark = pytest.mark.cpu


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    # New memory is filled with nan.
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "device meta": lambda: torch.device("meta"),
    "default device meta": default_device,
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": deterministic,
    "dispatch mode": SeesOperators,
    "function mode": SeesFunctions,
    "profiler": profiler,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        of_model = {"device": "cpu", "dtype": torch.float32}
        self.first, self.last = nn.Linear(4, 4, **of_model), nn.Linear(4, 3, **of_model)
        self.register_buffer("scale", torch.full((1,), 2.0, **of_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)  # type: ignore[no-any-return]


class Pair:
    """A model of an API and the plain model, with an optimizer for each, and the same batch for all ranks.

    Args:
        api: the API.
        mode: the mode of the test.
        steps: number of steps that both have trained.
    """

    def __init__(self, api: Api, mode: Callable[[], Any], steps: int) -> None:
        torch.manual_seed(0)
        self.api, self.mode, self.plain, self.x = api, mode, Net(), torch.randn(2, 4, device="cpu", dtype=torch.float32)
        self.model = self.sharded(copy.deepcopy(self.plain))
        self.optimizer, self.plain_optimizer = self.new_optimizer(self.model), self.new_optimizer(self.plain)
        for _ in range(steps):
            self.train()

    def sharded(self, model: nn.Module, **options: Any) -> Any:
        api = self.api.of_torch() if ENGINE == "torch" else self.api
        return api.shard(model, unit_classes=(nn.Linear,), **options)

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, where torch's AdamW works in this mode.

        AdamW of torch 2.11 creates its step on the default device. It reads the step, and "meta" has no values.
        """
        with self.mode():
            is_meta = torch.get_default_device().type == "meta"
        if is_meta and torch.__version__ < "2.12":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(self) -> None:
        for model, optimizer in ((self.model, self.optimizer), (self.plain, self.plain_optimizer)):
            optimizer.zero_grad()
            model(self.x).square().sum().backward()
            optimizer.step()

    def check(self) -> None:
        """Compares the weights of both models."""
        same(self.api.values(self.model), dict(self.plain.named_parameters()))


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        one, other = full(value).detach().clone(), full(expected[name]).detach().clone()
        assert (one.device.type, one.dtype) == ("cpu", other.dtype), name
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype is torch.bfloat16 else 1e-5, atol=1e-5)


# ---- the calls ------------------------------------------------------------------------------------------------------


def construct(pair: Pair) -> None:
    model = copy.deepcopy(pair.plain)
    with pair.mode():
        pair.model = pair.sharded(model)
    pair.optimizer, pair.plain_optimizer = pair.new_optimizer(pair.model), pair.new_optimizer(pair.plain)


def forward(pair: Pair) -> None:
    with pair.mode():
        found, expected = pair.model(pair.x), pair.plain(pair.x)
    same({"output": found}, {"output": expected})
    assert found.requires_grad == expected.requires_grad


def evaluation(pair: Pair) -> None:
    pair.model.eval(), pair.plain.eval()
    forward(pair)
    pair.model.train(), pair.plain.train()


def backward(pair: Pair) -> None:
    losses = [model(pair.x).square().sum() for model in (pair.model, pair.plain)]
    with pair.mode():
        for loss in losses:
            loss.backward()
    same(pair.api.gradients(pair.model), {name: p.grad for name, p in pair.plain.named_parameters()})
    pair.optimizer.step(), pair.plain_optimizer.step()


def accumulation(pair: Pair) -> None:
    losses = [model(pair.x).square().sum() for model in (pair.model, pair.plain)]
    with pair.mode(), pair.api.no_sync(pair.model):
        for loss in losses:
            loss.backward()
    for model in (pair.model, pair.plain):
        model(pair.x).square().sum().backward()
    same(pair.api.gradients(pair.model), {name: p.grad for name, p in pair.plain.named_parameters()})


def step(pair: Pair) -> None:
    for model in (pair.model, pair.plain):
        model(pair.x).square().sum().backward()
    with pair.mode():
        pair.plain_optimizer.step(), pair.optimizer.step()


def clip(pair: Pair) -> None:
    for model in (pair.model, pair.plain):
        model(pair.x).square().sum().backward()
    with pair.mode():
        found = pair.api.clip(pair.model, 0.5)
    same({"norm": found}, {"norm": nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)})
    pair.optimizer.step(), pair.plain_optimizer.step()


def zero_grad(pair: Pair) -> None:
    pair.model(pair.x).sum().backward()
    with pair.mode():
        pair.model.zero_grad(set_to_none=False)
        pair.model.zero_grad()
    assert all(p.grad is None for p in pair.model.parameters())


def buffers(pair: Pair) -> None:
    with pair.mode():
        found = [buffer for _, buffer in pair.model.named_buffers()]
    same({"scale": found[0]}, {"scale": pair.plain.scale})


def full_params(pair: Pair) -> None:
    """``summon_full_params`` or ``unshard``."""
    with pair.mode(), contextlib.ExitStack() as stack:
        if pair.api == FULLY_SHARD:
            for module in (pair.model, pair.model.first, pair.model.last):
                module.unshard(async_op=True).wait()
                stack.callback(module.reshard)
        else:
            stack.enter_context(FullyShardedDataParallel.summon_full_params(pair.model))
        same(dict(pair.model.named_parameters()), dict(pair.plain.named_parameters()))


def changed_full_params(pair: Pair) -> None:
    if pair.api == FULLY_SHARD:
        # Values that are written to unsharded parameters are not kept.
        full_params(pair)
        return
    with pair.mode(), FullyShardedDataParallel.summon_full_params(pair.model), torch.no_grad():
        for value in (*pair.model.parameters(), *pair.plain.parameters()):
            value.mul_(0.5)


def state_dict(pair: Pair) -> None:
    with pair.mode():
        state = pair.model.state_dict()
    same({name: full(value) for name, value in state.items()}, pair.plain.state_dict())
    other = pair.sharded(Net())
    with pair.mode():
        other.load_state_dict(state)
    pair.model, pair.optimizer, pair.plain_optimizer = other, pair.new_optimizer(other), pair.new_optimizer(pair.plain)


def states_of_functions(pair: Pair) -> None:
    """``get_state_dict`` and ``set_state_dict``."""
    pair.train()
    with pair.mode():
        states = get_state_dict(pair.model, pair.optimizer)
    pair.model = pair.sharded(Net())
    pair.optimizer = pair.new_optimizer(pair.model)
    with pair.mode():
        set_state_dict(pair.model, pair.optimizer, model_state_dict=states[0], optim_state_dict=states[1])


def loss_scaling(pair: Pair) -> None:
    scaler = ShardedGradScaler("cpu", init_scale=16.0)
    pair.optimizer.zero_grad(), pair.plain_optimizer.zero_grad()
    scaler.scale(pair.model(pair.x).square().sum()).backward()
    pair.plain(pair.x).square().sum().backward()
    with pair.mode():
        scaler.unscale_(pair.optimizer)
        scaler.step(pair.optimizer)
        scaler.update()
        pair.plain_optimizer.step()


def conversion(pair: Pair) -> None:
    with pair.mode():
        found, expected = pair.model.double()(pair.x.double()), pair.plain.double()(pair.x.double())
    same({"output": found}, {"output": expected})
    # In inference mode, the conversion of the plain model has created tensors that autograd does not save.
    trained = Net().double()
    trained.load_state_dict(pair.plain.state_dict())
    pair.plain, pair.x = trained, pair.x.double()
    pair.optimizer, pair.plain_optimizer = pair.new_optimizer(pair.model), pair.new_optimizer(pair.plain)


# For each call, the modes in which torch's FSDPs raise an error, in the call or in the next step. In inference mode,
# they create tensors that autograd cannot save and that later steps cannot change. They cannot be converted after a
# step.
IN_INFERENCE, IN_ALL = ("inference_mode",), tuple(MODES)
CALLS: dict[Callable[[Pair], None], tuple[str, ...]] = {
    construct: IN_INFERENCE,
    forward: IN_INFERENCE,
    evaluation: IN_INFERENCE,
    backward: (),
    accumulation: (),
    step: (),
    clip: (),
    zero_grad: (),
    buffers: (),
    full_params: IN_INFERENCE,
    changed_full_params: IN_INFERENCE,
    state_dict: IN_INFERENCE,
    states_of_functions: IN_INFERENCE,
    loss_scaling: (),
    conversion: IN_ALL,
}


@pytest.mark.spec("PAR-10")
@all_apis
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@ranks(2)
def test_a_call_in_a_mode_has_the_result_of_the_plain_model(api: Api, call: Callable[[Pair], None], mode: str) -> None:
    # In inference mode, the plain model cannot accumulate gradients, and its optimizer cannot take its first step.
    not_plain = {accumulation: (0, 1), step: (0,), loss_scaling: (0,)} if mode == "inference_mode" else {}
    is_refused = ENGINE == "torch" and mode in CALLS[call]
    with pytest.raises(Exception) if is_refused else contextlib.nullcontext():
        for steps in {0, 1} - set(not_plain.get(call, ())):
            pair = Pair(api, MODES[mode], steps)
            call(pair)
            pair.train()
            pair.check()


@pytest.mark.spec("PAR-10")
@all_apis
# Autocast keeps the cast weights of the plain model until the mode ends, also if the program changes the weights.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "autocast"])
@ranks(2)
def test_a_program_that_runs_in_a_mode_evaluates_like_the_plain_model(api: Api, mode: str) -> None:
    with MODES[mode]():
        pair = Pair(api, contextlib.nullcontext, 0)
        for call in (evaluation, full_params, changed_full_params, state_dict, buffers, evaluation, conversion):
            call(pair)


@pytest.mark.spec("PAR-10")
@all_apis
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("inference_mode", "no_grad", "autocast")])
@ranks(2)
def test_a_program_that_runs_in_a_mode_trains_like_the_plain_model(api: Api, mode: str) -> None:
    with MODES[mode]():
        pair = Pair(api, contextlib.nullcontext, 1)
        for call in (forward, backward, accumulation, clip, state_dict, states_of_functions):
            call(pair)
            pair.train()
            pair.check()
