"""The engine's cost in Python calls, calls into C and operators, counted in a separate process and printed as JSON.

A fake process group sends no data, so one process is enough and never waits. The fake group must be the default group,
so the program needs its own process. The cost of a unit is the difference between a model of 12 units and one of 4,
minus the same difference of plain models. The program measures no times, so its results are the same on every machine.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = (12, 4)

Action = Callable[[], None]
Count = Callable[[Action], float]


def build(num_units: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_units)))


def sharded(library: Any, num_units: int, strategy: str, **options: Any) -> nn.Module:
    model = build(num_units)
    options["sharding_strategy"] = library.ShardingStrategy[strategy]
    for index in range(num_units):
        model[index] = library.FullyShardedDataParallel(model[index], **options)
    made: nn.Module = library.FullyShardedDataParallel(model, **options)
    return made


def fully_sharded(library: Any, num_units: int, *, keeps: bool) -> nn.Module:
    model = build(num_units)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        library.fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps)
    made: nn.Module = library.fully_shard(model, mesh=mesh, reshard_after_forward=not keeps)
    return made


def step(model: nn.Module) -> None:
    model(torch.ones(4, 8)).sum().backward()


def warmed_up(model: nn.Module) -> nn.Module:
    """Returns the model after three steps."""
    for _ in range(3):
        step(model)
        model.zero_grad()
    return model


def calls_by_file(action: Action, counts: str = "call") -> Counter[str]:
    """Calls of Python functions while ``action`` runs, by the file that defines the function.

    Args:
        action: the function to run.
        counts: ``"c_call"`` counts the calls of functions and methods that are written in C, by the file that calls.
    """
    counted: Counter[str] = Counter()

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        if event == counts:
            counted[frame.f_code.co_filename] += 1

    # The garbage collector calls the finalizers of earlier models.
    gc.collect()
    # Imported objects stay alive. Without this line, each collection takes 100 ms.
    gc.freeze()
    gc.disable()
    sys.setprofile(notice)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted


class Operators(TorchDispatchMode):
    """Counts the operators that PyTorch's dispatcher executes."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return function(*args, **(kwargs or {}))


def operators(action: Action) -> int:
    with Operators() as counted:
        action()
    return counted.num


def of_a_step(model: nn.Module, count: Count) -> float:
    counted = count(functools.partial(step, model))
    model.zero_grad()
    return counted


def per_unit(models: Iterable[nn.Module], count: Count) -> float:
    """The difference of the counts of a step in a model of each of `SIZES`, for one unit."""
    large, small = (of_a_step(model, count) for model in models)
    return (large - small) / (SIZES[0] - SIZES[1])


def costs(models: list[nn.Module], plain: list[nn.Module]) -> dict[str, float]:
    """The cost that a unit adds to a step of the plain model."""
    counts: dict[str, Count] = {
        "calls": lambda action: calls_by_file(action).total(),
        "calls into C": lambda action: calls_by_file(action, "c_call").total(),
        "operators": operators,
    }
    return {name: per_unit(models, count) - per_unit(plain, count) for name, count in counts.items()}


def of_the_ledger(action: Action, counts: str) -> int:
    """Calls of the collective log and of the check that all ranks issue the same collectives."""
    from minifsdp.checks import collective_log, rank_checks
    from minifsdp.engine import messages

    counted = calls_by_file(action, counts)
    return sum(counted[module.__file__] for module in (collective_log, messages, rank_checks))


def main() -> None:
    import torch.distributed.fsdp as torch_fsdp
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import minifsdp
    from minifsdp.debugging import trace

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    makers: dict[str, Callable[..., nn.Module]] = {
        "fully_shard frees": functools.partial(fully_sharded, keeps=False),
        "fully_shard keeps": functools.partial(fully_sharded, keeps=True),
    }
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for kind in ("flat", "original"):
            makers[f"{strategy} {kind}"] = functools.partial(
                sharded, strategy=strategy, use_orig_params=kind == "original", device_id=torch.device("cpu")
            )

    def of_the_trace(action: Action) -> int:
        return calls_by_file(action)[trace.__file__]

    plain = [warmed_up(build(size)) for size in SIZES]
    answer: dict[str, Any] = {"costs": {}, "trace": {}, "ledger": {}}
    for key, make in makers.items():
        models = [warmed_up(make(minifsdp, size)) for size in SIZES]
        answer["trace"][key] = of_a_step(models[0], of_the_trace)
        answer["ledger"][key] = {
            counts: per_unit(models, functools.partial(of_the_ledger, counts=counts)) for counts in ("call", "c_call")
        }
        answer["costs"][f"minifsdp {key}"] = costs(models, plain)
        of_torch = [warmed_up(make(torch_fsdp, size)) for size in SIZES]
        answer["costs"][f"torch {key}"] = costs(of_torch, plain)
    with trace.record():
        models = [warmed_up(sharded(minifsdp, size, "FULL_SHARD")) for size in SIZES]
        answer["trace"]["recording"] = per_unit(models, of_the_trace)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
