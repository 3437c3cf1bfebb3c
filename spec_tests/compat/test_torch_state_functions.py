"""The functions of ``torch.distributed.checkpoint.state_dict`` over each kind of model: the results of torch's FSDPs.

Each row of the table is a call and its options. The reference is the same call for the same model in torch's FSDPs. A
program may replace torch's names of FSDP by those of minifsdp, or keep them. In both cases it calls torch's functions.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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


def values_of(model: nn.Module) -> Any:
    """All full parameters, by the names of the plain model."""
    return functions.get_model_state_dict(model, options=StateDictOptions(**FULL))


# --- calls ---

# Each gets the model and its optimizers, the same with other values, and the options.
Run = tuple[Any, list[torch.optim.Optimizer]]
Call = Callable[[Run, Run, StateDictOptions], Any]


def get_model(run: Run, other: Run, options: StateDictOptions) -> Any:
    return functions.get_model_state_dict(run[0], options=options)


def get_optimizer(run: Run, other: Run, options: StateDictOptions) -> Any:
    return functions.get_optimizer_state_dict(*run, options=options)


def get_a_unit(run: Run, other: Run, options: StateDictOptions) -> Any:
    return functions.get_model_state_dict(run[0], submodules={run[0][0]}, options=options)


def get_a_part_of_a_unit(run: Run, other: Run, options: StateDictOptions) -> Any:
    parts = {run[0][1].linear, run[0][3]}
    return functions.get_model_state_dict(run[0], submodules=parts, options=options)


def saved(get: Call, run: Run, options: StateDictOptions) -> Any:
    """The state of ``run``, to be loaded with ``options``."""
    state = get(run, run, replace(options, broadcast_from_rank0=False, strict=True))
    return {} if options.broadcast_from_rank0 and dist.get_rank() else copy.copy(state)


def set_model(run: Run, other: Run, options: StateDictOptions) -> Any:
    result = functions.set_model_state_dict(other[0], saved(get_model, run, options), options=options)
    return [result.missing_keys, result.unexpected_keys, values_of(other[0])]


def set_optimizer(run: Run, other: Run, options: StateDictOptions) -> Any:
    functions.set_optimizer_state_dict(*other, saved(get_optimizer, run, options), options=options)
    train(*other, 2)
    return values_of(other[0])


def result_of(
    fsdp: Any,
    call: Call,
    layout: str,
    choices: dict[str, Any],
    steps: int = 1,
    structure: str = "root",
    optimizers: Any = adam,
) -> Any:
    with quiet():
        model, other = (made(fsdp, layout, seed, structure) for seed in (0, 1))
        run = model, optimizers(model)
        train(*run, steps)
        return described(call(run, (other, optimizers(other)), StateDictOptions(**choices)))


def id_of(value: Any) -> str:
    named = value.__name__ if callable(value) else ",".join(value) or "default" if isinstance(value, dict) else value
    return str(named)


ON_CPU, UNFROZEN = {"cpu_offload": True}, {"ignore_frozen_params": True}
WITHOUT_PREFIX = {"keep_submodule_prefixes": False, **FULL}
ROWS: list[tuple[Call, list[dict[str, Any]]]] = [
    (get_model, [{}, FULL, ON_CPU, FULL | ON_CPU, FROM_RANK_0]),
    (get_model, [UNFROZEN, UNFROZEN | FULL, {"dsd_fqn_modifiers": "_renamed"}]),
    (get_a_unit, [{}, WITHOUT_PREFIX]),
    (get_a_part_of_a_unit, [{}, WITHOUT_PREFIX]),
    (get_optimizer, [{}, FULL, ON_CPU, FROM_RANK_0]),
    (set_model, [{}, FULL, ON_CPU, FROM_RANK_0, UNFROZEN | {"strict": False}]),
    (set_optimizer, [{}, FULL, ON_CPU, FROM_RANK_0]),
]
OF_OPTIMIZERS = (get_optimizer, set_optimizer)


@pytest.mark.spec("PROG-98", "FS2-SD-08")
@pytest.mark.parametrize("names", ["replaced", "kept"])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("call", "choices"), [(call, choices) for call, row in ROWS for choices in row], ids=id_of)
@ranks(2)
def test_a_function_of_torch_returns_what_it_returns_for_torchs_fsdp(
    call: Call, choices: dict[str, Any], layout: str, steps: int, names: str
) -> None:
    if names == "kept" and layout != "per-parameter" and call in OF_OPTIMIZERS:
        # torch's functions call static methods of torch's wrapper for these states.
        with pytest.raises(AttributeError, match=rf"rank {dist.get_rank()}: .*from minifsdp"):
            result_of(subject, call, layout, choices, steps)
        return
    expected = result_of(torch_fsdp, call, layout, choices, steps)
    with replaced_names() if names == "replaced" else contextlib.nullcontext():
        assert result_of(subject, call, layout, choices, steps) == expected


@pytest.mark.spec("PROG-98")
@pytest.mark.parametrize("structure", ["root without parameters", "in a container", "no root"])
@pytest.mark.parametrize("layout", ["flat", "original"])
@pytest.mark.parametrize("choices", [{}, FULL, FROM_RANK_0], ids=id_of)
@pytest.mark.parametrize("call", [get_model, get_optimizer, set_model, set_optimizer], ids=id_of)
@ranks(2)
def test_a_program_that_replaced_torchs_names_saves_and_loads_each_structure(
    call: Any, choices: dict[str, Any], layout: str, structure: str
) -> None:
    expected = result_of(torch_fsdp, call, layout, choices, structure=structure)
    with replaced_names():
        assert result_of(subject, call, layout, choices, structure=structure) == expected


@pytest.mark.spec("PROG-64", "PROG-98")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("choices", [{}, FULL, FROM_RANK_0, {"flatten_optimizer_state_dict": True}], ids=id_of)
@ranks(2)
def test_two_optimizers_of_one_model_are_saved_and_loaded(choices: dict[str, Any], layout: str) -> None:
    arguments = set_optimizer, layout, choices, 1, "root without parameters", two_optimizers
    expected = result_of(torch_fsdp, *arguments)
    with replaced_names():
        assert result_of(subject, *arguments) == expected
