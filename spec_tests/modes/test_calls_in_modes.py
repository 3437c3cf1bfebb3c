"""Calls of the public API inside modes of torch that change how tensors are created or recorded.

A test enters a mode around one call, before the first step and after it. Then the model trains one step without the
mode. The plain model does the same, and must have the same results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, Api, all_apis
from spec_tests.models.values import full
from spec_tests.subject import FullyShardedDataParallel, ShardedGradScaler, get_state_dict, set_state_dict

pytestmark = pytest.mark.cpu

Named = dict[str, Tensor]


@contextlib.contextmanager
def setting(function: Callable[[Any], object], value: Any, usual: Any) -> Iterator[None]:
    """Calls a function of torch with a value, and at the end with the usual value."""
    function(value)
    try:
        yield
    finally:
        function(usual)


def profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bfloat16": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: setting(torch.set_default_device, "meta", None),
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    # New memory is filled with nan.
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "dispatch mode": BaseTorchDispatchMode,
    "function mode": BaseTorchFunctionMode,
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


class Run:
    """A model and its optimizer.

    Args:
        api: shards the model; None for the plain model.
        mode: the mode in which the optimizer will be used.
        steps: number of steps that the model has trained.
        inside: the mode in which the model is sharded.
    """

    def __init__(self, api: Api | None, mode: Callable[[], Any], steps: int = 0, inside: Any = contextlib.nullcontext):
        self.api, self.mode = api, mode
        torch.manual_seed(0)
        self.x = torch.randn(2, 4, device="cpu", dtype=torch.float32)
        self.model: Any = Net()
        with inside():
            self.model = self.sharded(self.model)
        self.optimizer = self.new_optimizer()
        for _ in range(steps):
            self.train()

    def sharded(self, model: nn.Module, **options: Any) -> Any:
        return model if self.api is None else self.api.shard(model, unit_classes=(nn.Linear,), **options)

    def new_optimizer(self) -> torch.optim.Optimizer:
        """AdamW, where torch's AdamW works in this mode.

        AdamW of torch 2.11 creates its step on the default device. It reads the step, and "meta" has no values.
        """
        with self.mode():
            is_meta = torch.get_default_device().type == "meta"
        if is_meta and torch.__version__ < "2.12":
            return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def loss(self) -> Tensor:
        loss: Tensor = self.model(self.x).square().sum()
        return loss

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def values(self) -> Named:
        return dict(self.model.named_parameters()) if self.api is None else self.api.values(self.model)

    def gradients(self) -> Named:
        if self.api is None:
            return {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return self.api.gradients(self.model)


def assert_equal(found: Named, expected: Named) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        one, other = full(value).detach().clone(), full(expected[name]).detach().clone()
        assert (one.device.type, one.dtype) == ("cpu", other.dtype), name
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype is torch.bfloat16 else 1e-5, atol=1e-5)


# --- the calls, which return what must be equal for both models ---


def construct(run: Run) -> Named:
    run.__init__(run.api, run.mode, inside=run.mode)  # type: ignore[misc]
    return {}


def forward(run: Run) -> Named:
    with run.mode():
        output = run.model(run.x)
    return {"output": output, "requires_grad": torch.tensor(output.requires_grad, device="cpu")}


def evaluation(run: Run) -> Named:
    run.model.eval()
    found = forward(run)
    run.model.train()
    return found


def backward(run: Run) -> Named:
    loss = run.loss()
    with run.mode():
        loss.backward()
    found = run.gradients()
    run.optimizer.step()
    return found


def accumulation(run: Run) -> Named:
    loss = run.loss()
    with run.mode(), contextlib.nullcontext() if run.api is None else run.api.no_sync(run.model):
        loss.backward()
    run.loss().backward()
    return run.gradients()


def step(run: Run) -> Named:
    run.loss().backward()
    with run.mode():
        run.optimizer.step()
    return {}


def clip(run: Run) -> Named:
    run.loss().backward()
    if run.api is None:
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    else:
        with run.mode():
            norm = run.api.clip(run.model, 0.5)
    run.optimizer.step()
    return {"norm": norm}


def zero_grad(run: Run) -> Named:
    run.loss().backward()
    with run.mode():
        run.model.zero_grad(set_to_none=False)
        run.model.zero_grad()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    return {}


def buffers(run: Run) -> Named:
    with run.mode():
        return {name.rpartition(".")[2]: buffer for name, buffer in run.model.named_buffers()}


def full_params(run: Run) -> Named:
    """``summon_full_params`` or ``unshard``. Values that are written inside ``summon_full_params`` are kept."""
    with run.mode(), contextlib.ExitStack() as stack:
        if run.api == FULLY_SHARD:
            for module in (run.model, run.model.first, run.model.last):
                module.unshard(async_op=True).wait()
                stack.callback(module.reshard)
        elif run.api is not None:
            stack.enter_context(FullyShardedDataParallel.summon_full_params(run.model))
        return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def changed_full_params(run: Run) -> Named:
    with contextlib.ExitStack() as stack:
        if run.api not in (FULLY_SHARD, None):
            stack.enter_context(run.mode())
            stack.enter_context(FullyShardedDataParallel.summon_full_params(run.model))
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.5)
    return {}


def state_dict(run: Run) -> Named:
    with run.mode():
        state = run.model.state_dict()
    run.model = run.sharded(Net())
    with run.mode():
        run.model.load_state_dict(state)
    run.optimizer = run.new_optimizer()
    return state


def states_of_functions(run: Run) -> Named:
    """``get_state_dict`` and ``set_state_dict``."""
    run.train()
    if run.api is not None:
        with run.mode():
            of_model, of_optimizer = get_state_dict(run.model, run.optimizer)
        run.model = run.sharded(Net())
        run.optimizer = run.new_optimizer()
        with run.mode():
            set_state_dict(run.model, run.optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return {}


def loss_scaling(run: Run) -> Named:
    scaler = ShardedGradScaler("cpu", init_scale=16.0)
    run.optimizer.zero_grad()
    scaler.scale(run.loss()).backward()
    with run.mode():
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
    return {}


def conversion(run: Run) -> Named:
    run.x = run.x.double()
    with run.mode():
        output = run.model.double()(run.x)
    if run.api is None:
        # In inference mode, the conversion of the plain model has created tensors that autograd does not save.
        state, run.model = run.model.state_dict(), Net().double()
        run.model.load_state_dict(state)
    run.optimizer = run.new_optimizer()
    return {"output": output}


CALLS = [construct, forward, evaluation, backward, accumulation, step, clip, zero_grad, buffers, full_params]
CALLS += [changed_full_params, state_dict, states_of_functions, loss_scaling, conversion]


@pytest.mark.spec("PAR-10")
@all_apis
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@ranks(2)
def test_a_call_in_a_mode_has_the_result_of_the_plain_model(api: Api, call: Callable[[Run], Named], mode: str) -> None:
    # In inference mode, the plain model cannot accumulate gradients, and its optimizer cannot take its first step.
    not_plain = {accumulation: (0, 1), step: (0,), loss_scaling: (0,)} if mode == "inference_mode" else {}
    for steps in {0, 1} - set(not_plain.get(call, ())):
        model, plain = (Run(one, MODES[mode], steps) for one in (api, None))
        assert_equal(call(model), call(plain))
        for run in (model, plain):
            run.train()
        assert_equal(model.values(), plain.values())


@pytest.mark.spec("PAR-10")
@all_apis
# Autocast keeps the cast weights of the plain model until the mode ends, also if the program changes the weights.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "autocast"])
@ranks(2)
def test_a_program_that_runs_in_a_mode_has_the_results_of_the_plain_model(api: Api, mode: str) -> None:
    calls = [evaluation, full_params, changed_full_params, state_dict, buffers, evaluation]
    if mode not in ("inference_mode", "no_grad"):
        calls += [forward, backward, accumulation, clip, Run.train, state_dict, states_of_functions, Run.train]
    with MODES[mode]():
        model, plain = (Run(one, contextlib.nullcontext) for one in (api, None))
        for call in calls:
            assert_equal(call(model) or {}, call(plain) or {})
        assert_equal(model.values(), plain.values())
        assert_equal(conversion(model), conversion(plain))
