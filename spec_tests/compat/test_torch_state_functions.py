"""The functions of ``torch.distributed.checkpoint.state_dict`` over each kind of model: the results of torch's FSDPs.

Each row of the tables is a call and its options. The reference is the same call for the same model in torch's FSDPs. A
program may replace torch's names of FSDP by those of minifsdp, or keep them. In both cases it calls torch's functions.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as functions
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

import minifsdp
from spec_tests import subject
from spec_tests.checkpoint.checkpoints import quiet
from spec_tests.harness import device, ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LAYOUTS = ["flat", "original", "per-parameter"]
FULL = {"full_state_dict": True}
FROM_RANK_0 = {"full_state_dict": True, "broadcast_from_rank0": True}
ON_RANK_0 = {"full_state_dict": True, "cpu_offload": True}


@contextmanager
def replaced_names() -> Iterator[None]:
    """Replaces torch's names of FSDP by those of minifsdp, in all modules of torch."""
    ours = {id(getattr(torch_fsdp, n)): getattr(minifsdp, n) for n in minifsdp.__all__ if hasattr(torch_fsdp, n)}
    with pytest.MonkeyPatch.context() as patch:
        for module in [m for name, m in sys.modules.items() if name.startswith("torch.")]:
            for name in [name for name, value in vars(module).items() if id(value) in ours]:
                patch.setattr(module, name, ours[id(getattr(module, name))])
        yield


class Part(nn.Module):
    """A linear layer with a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor([7.0]))

    def get_extra_state(self) -> dict[str, int]:
        return {"number": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"number": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def made(fsdp: Any, layout: str, seed: int = 0, structure: str = "root") -> Any:
    """Four layers in the FSDP of ``fsdp``. The first and the third are units, and the third is frozen."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(3, 4), Part(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 3))
    model.to(device())
    model[2].requires_grad_(False)
    units = [(model, "0"), (model, "2")]
    if structure == "root without parameters":
        units += [(model[1], "linear"), (model, "3")]
    if layout == "per-parameter":
        for parent, name in units:
            fsdp.fully_shard(getattr(parent, name))
        model = fsdp.fully_shard(model)
    else:
        choices = {"device_id": device(), "use_orig_params": layout == "original"}
        for parent, name in units:
            setattr(parent, name, fsdp.FullyShardedDataParallel(getattr(parent, name), **choices))
        if structure != "no root":
            model = fsdp.FullyShardedDataParallel(model, **choices)
    return nn.ModuleDict({"module": model}) if structure == "in a container" else model


def train(model: Any, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for step in range(steps):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device())
        (model["module"] if isinstance(model, nn.ModuleDict) else model)(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=0.01)]


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One for the first layer, one for the others. Torch refuses two for the original parameters of one unit."""
    named = [(name.removeprefix("_fsdp_wrapped_module."), parameter) for name, parameter in model.named_parameters()]
    first = [parameter for name, parameter in named if name.startswith("0.")]
    others = [parameter for name, parameter in named if not name.startswith("0.")]
    return [torch.optim.Adam(first, lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def described(value: Any) -> Any:
    """The types, sizes and values of a state, to compare with ``==``."""
    if isinstance(value, (ShardedTensor, DTensor)):
        local = [s.tensor for s in value.local_shards()] if isinstance(value, ShardedTensor) else [value.to_local()]
        return [type(value).__name__, list(value.size()), described(local)]
    if isinstance(value, torch.Tensor):
        return [value.device.type, value.dtype, list(value.shape), value.tolist()]
    if isinstance(value, dict):
        return {name: described(inner) for name, inner in value.items()}
    return [described(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def values_of(fsdp: Any, model: nn.Module) -> Any:
    """All full parameters, by the names of the plain model."""
    found = functions.get_model_state_dict(model, options=StateDictOptions(**FULL))
    return {name: described(value) for name, value in found.items()}


# --- calls: each gets the model and its optimizers, and a function that makes the model with other values ---

Call = Callable[[Any, Any, list[torch.optim.Optimizer], Callable[[], Any], StateDictOptions], Any]


def get_model(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    return functions.get_model_state_dict(model, options=options)


def get_optimizer(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    return functions.get_optimizer_state_dict(model, optimizers, options=options)


def get_both(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    return functions.get_state_dict(model, optimizers, options=options)


def get_a_unit(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    return functions.get_model_state_dict(model, submodules={model[0]}, options=options)


def get_a_part_of_a_unit(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    return functions.get_model_state_dict(model, submodules={model[1].linear, model[3]}, options=options)


def saved(get: Callable[..., Any], options: StateDictOptions) -> Any:
    """What ``get`` returns with these options; on rank 0 alone, if the values are sent from there."""
    choices = vars(options) | {"broadcast_from_rank0": False, "strict": True}
    with quiet():
        state = copy.copy(get(options=StateDictOptions(**choices)))
    return {} if options.broadcast_from_rank0 and dist.get_rank() else state


def set_model(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    new, _ = other()
    state = saved(lambda options: functions.get_model_state_dict(model, options=options), options)
    result = functions.set_model_state_dict(new, state, options=options)
    return [list(result.missing_keys), list(result.unexpected_keys), values_of(fsdp, new)]


def set_part_of_model(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    new, _ = other()
    state = saved(lambda options: functions.get_model_state_dict(model, options=options), options)
    for name in [name for name in state if name.startswith("0.")]:
        state["unknown." + name] = state.pop(name)
    result = functions.set_model_state_dict(new, state, options=options)
    return [sorted(result.missing_keys), sorted(result.unexpected_keys), values_of(fsdp, new)]


def set_a_module(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    new, _ = other()
    given = {new[0]: {"weight": torch.ones(4, 3), "bias": torch.ones(4)}}
    functions.set_model_state_dict(new, given, options=options)
    return values_of(fsdp, new)


def set_optimizer(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    new, fresh = other()
    state = saved(lambda options: functions.get_optimizer_state_dict(model, optimizers, options=options), options)
    functions.set_optimizer_state_dict(new, fresh, state, options=options)
    train(new, fresh, 2)
    return values_of(fsdp, new)


def set_both(fsdp: Any, model: Any, optimizers: Any, other: Any, options: StateDictOptions) -> Any:
    new, fresh = other()
    state = saved(lambda options: functions.get_state_dict(model, optimizers, options=options), options)
    functions.set_state_dict(new, fresh, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    train(new, fresh, 2)
    return values_of(fsdp, new)


TORCH = SimpleNamespace(
    FullyShardedDataParallel=torch_fsdp.FullyShardedDataParallel, fully_shard=torch_fsdp.fully_shard
)
OURS = SimpleNamespace(FullyShardedDataParallel=subject.FullyShardedDataParallel, fully_shard=subject.fully_shard)


def result_of(
    fsdp: Any, call: Call, layout: str, choices: dict[str, Any], steps: int, structure: str, optimizers: Any = adam
) -> Any:
    def new(seed: int) -> tuple[Any, list[torch.optim.Optimizer]]:
        model = made(fsdp, layout, seed, structure)
        return model, optimizers(model)

    model, trained = new(0)
    train(model, trained, steps)
    with quiet():
        return described(call(fsdp, model, trained, lambda: new(1), StateDictOptions(**choices)))


def id_of(value: Any) -> str:
    named = value.__name__ if callable(value) else ",".join(value) or "default" if isinstance(value, dict) else value
    return str(named)


# A call, its options, and torch's verdict on it for the three layouts.
RIGHT = {"flat": "right", "original": "right", "per-parameter": "right"}
NOT_ON_CPUS = {"flat": "not on CPUs", "original": "not on CPUs", "per-parameter": "right"}
REFUSED = {"flat": "RuntimeError", "original": "RuntimeError", "per-parameter": "RuntimeError"}
ROWS: list[tuple[Call, dict[str, Any], dict[str, str]]] = [
    (get_model, {}, RIGHT),
    (get_model, FULL, RIGHT),
    (get_model, {"cpu_offload": True}, RIGHT),
    (get_model, ON_RANK_0, NOT_ON_CPUS),
    (get_model, FROM_RANK_0, RIGHT),
    (get_model, {"ignore_frozen_params": True}, RIGHT),
    (get_model, {"ignore_frozen_params": True, **FULL}, RIGHT),
    (get_model, {"dsd_fqn_modifiers": "_renamed"}, RIGHT),
    (get_a_unit, {}, RIGHT),
    (get_a_unit, {"keep_submodule_prefixes": False, **FULL}, RIGHT),
    (get_a_part_of_a_unit, {}, RIGHT),
    (get_a_part_of_a_unit, {"keep_submodule_prefixes": False, **FULL}, RIGHT),
    (get_optimizer, {}, RIGHT),
    (get_optimizer, FULL, RIGHT),
    (get_optimizer, {"cpu_offload": True}, RIGHT),
    (get_optimizer, ON_RANK_0, NOT_ON_CPUS),
    (get_optimizer, FROM_RANK_0, RIGHT),
    (get_both, {}, RIGHT),
    (get_both, {"ignore_frozen_params": True, **FULL}, RIGHT),
    (set_model, {}, RIGHT),
    (set_model, FULL, RIGHT),
    (set_model, {"cpu_offload": True}, RIGHT),
    (set_model, FROM_RANK_0, RIGHT),
    (set_model, {"ignore_frozen_params": True}, REFUSED),
    (set_model, {"ignore_frozen_params": True, "strict": False}, RIGHT),
    (set_part_of_model, {}, REFUSED),
    (set_part_of_model, {"strict": False}, RIGHT),
    (set_optimizer, {}, RIGHT),
    (set_optimizer, FULL, RIGHT),
    (set_optimizer, {"cpu_offload": True}, RIGHT),
    (set_optimizer, FROM_RANK_0, RIGHT),
    (set_both, {}, RIGHT),
    (set_both, FULL, RIGHT),
]

OF_OPTIMIZERS = (get_optimizer, get_both, set_optimizer, set_both)


@ranks(2)
def check_row(number: int, layout: str, steps: int, names: str) -> None:
    call, choices, verdicts = ROWS[number]
    verdict, asks_rank_0 = verdicts[layout], choices == ON_RANK_0
    arguments = call, layout, FULL if verdict == "not on CPUs" else choices, steps, "root"
    if verdict == "RuntimeError":
        with pytest.raises(RuntimeError):
            result_of(TORCH, *arguments)
    else:
        expected = result_of(TORCH, *arguments)
        if asks_rank_0 and dist.get_rank():
            expected = {}
    with replaced_names() if names == "replaced" else quiet():
        if verdict == "RuntimeError":
            with pytest.raises(RuntimeError):
                result_of(OURS, *arguments)
        elif (
            names == "kept" and layout != "per-parameter" and call in (get_optimizer, get_both, set_optimizer, set_both)
        ):
            # torch's functions call static methods of torch's wrapper for these states.
            with pytest.raises(AttributeError, match=rf"rank {dist.get_rank()}: .*from minifsdp"):
                result_of(OURS, call, layout, choices, steps, "root")
        else:
            assert result_of(OURS, call, layout, choices, steps, "root") == expected


@pytest.mark.spec("PROG-98")
@pytest.mark.parametrize("names", ["replaced", "kept"])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(ROWS)), ids=[f"{call.__name__}-{id_of(of)}" for call, of, _ in ROWS])
def test_a_function_of_torch_returns_what_it_returns_for_torchs_fsdp(
    number: int, layout: str, steps: int, names: str
) -> None:
    check_row(number=number, layout=layout, steps=steps, names=names)


@pytest.mark.spec("PROG-98")
@pytest.mark.parametrize("structure", ["root without parameters", "in a container", "no root"])
@pytest.mark.parametrize("layout", ["flat", "original"])
@pytest.mark.parametrize("choices", [{}, FULL, FROM_RANK_0], ids=id_of)
@pytest.mark.parametrize("call", [get_model, get_optimizer, set_model, set_optimizer], ids=id_of)
@ranks(2)
def test_a_program_that_replaced_torchs_names_saves_and_loads_each_structure(
    call: Any, choices: dict[str, Any], layout: str, structure: str
) -> None:
    expected = result_of(TORCH, call, layout, choices, 1, structure)
    with replaced_names():
        assert result_of(OURS, call, layout, choices, 1, structure) == expected


@pytest.mark.spec("PROG-64", "PROG-98")
@pytest.mark.parametrize("own", [False, True], ids=["torch's function", "minifsdp's function"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "choices",
    [{}, FULL, FROM_RANK_0, {"flatten_optimizer_state_dict": True}, {"flatten_optimizer_state_dict": True, **FULL}],
    ids=id_of,
)
@ranks(2)
def test_two_optimizers_of_one_model_are_saved_and_loaded(choices: dict[str, Any], layout: str, own: bool) -> None:
    def outcome_of(fsdp: Any) -> Any:
        try:
            return result_of(fsdp, set_optimizer, layout, choices, 1, "root without parameters", two_optimizers)
        except KeyError as error:
            return str(error)

    expected = outcome_of(TORCH)
    # torch cannot load a full dict of two optimizers that has one level.
    torch_fails = layout == "per-parameter" and choices == {"flatten_optimizer_state_dict": True, **FULL}
    assert (expected == "'param_groups.0.params.0'") is torch_fails
    with replaced_names(), pytest.MonkeyPatch.context() as patch:
        for name in ("get_optimizer_state_dict", "set_optimizer_state_dict") if own else ():
            patch.setattr(functions, name, getattr(minifsdp, name))
        assert outcome_of(OURS) == expected


@pytest.mark.spec("PROG-64")
@pytest.mark.parametrize("layout", ["flat", "original"])
@ranks(2)
def test_rank_0_gets_the_states_of_all_optimizers_and_the_others_get_none(layout: str) -> None:
    model = made(OURS, layout)
    optimizers = two_optimizers(model)
    train(model, optimizers, 1)
    state = subject.get_optimizer_state_dict(model, optimizers, options=StateDictOptions(**ON_RANK_0))
    trained = {"0.weight", "0.bias", "1.linear.weight", "1.linear.bias", "3.weight", "3.bias"}
    assert set(state.get("state", {})) == (set() if dist.get_rank() else trained)


class Counted(nn.Linear):
    """A layer with an extra state. As a unit of torch's wrapper, torch's functions raise AttributeError for it."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


@pytest.mark.spec("PROG-98")
@pytest.mark.parametrize("layout", ["flat", "original"])
@ranks(2)
def test_a_unit_with_an_extra_state_is_saved_and_loaded(layout: str) -> None:
    model: Any = nn.Sequential(Counted(3, 4), nn.Linear(4, 2)).to(device())
    expected = dict(copy.deepcopy(model).state_dict())
    model[0] = subject.FullyShardedDataParallel(model[0], device_id=device(), use_orig_params=layout == "original")
    state = functions.get_model_state_dict(model, options=StateDictOptions(**FULL))
    assert described(dict(state)) == described(expected)
    functions.set_model_state_dict(model, state, options=StateDictOptions(**FULL))
