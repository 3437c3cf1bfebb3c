"""The engine's cost in Python calls, calls into C and operators, counted in a separate process and printed as JSON.

A fake process group sends no data, so one process is enough and never waits. The fake group must be the default group,
so the program needs its own process. With 48 tiny units, the work per iteration is small compared to the work per unit.
The program subtracts the cost of the plain model. It counts calls and measures no times, so its results are the same on
every machine.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

NUM_UNITS = 48


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_UNITS)))


def sharded(library: Any, strategy: str, **options: Any) -> nn.Module:
    model = build()
    options["sharding_strategy"] = library.ShardingStrategy[strategy]
    for index in range(NUM_UNITS):
        model[index] = library.FullyShardedDataParallel(model[index], **options)
    made: nn.Module = library.FullyShardedDataParallel(model, **options)
    return made


def fully_sharded(library: Any, *, keeps: bool) -> nn.Module:
    model = build()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        library.fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps)
    made: nn.Module = library.fully_shard(model, mesh=mesh, reshard_after_forward=not keeps)
    return made


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def warmed_up(model: nn.Module) -> Callable[[], None]:
    """Returns a function that runs one more step of a model after three steps."""
    x = torch.randn(4, 8)
    for _ in range(3):
        step(model, x)
        model.zero_grad()
    return lambda: step(model, x)


def calls_by_file(action: Callable[[], None], counts: str = "call") -> Counter[str]:
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


def operators(action: Callable[[], None]) -> int:
    with Operators() as counted:
        action()
    return counted.num


def per_unit(model: nn.Module, count: Callable[[Callable[[], None]], int]) -> float:
    return (count(warmed_up(model)) - count(warmed_up(build()))) / NUM_UNITS


def costs(model: nn.Module) -> dict[str, float]:
    """The cost that a unit adds to a step of the plain model."""
    return {
        "calls": per_unit(model, lambda action: calls_by_file(action).total()),
        "calls into C": per_unit(model, lambda action: calls_by_file(action, "c_call").total()),
        "operators": per_unit(model, operators),
    }


def of_the_ledger(action: Callable[[], None], counts: str) -> float:
    """Calls per unit of the collective log and of the check that all ranks issue the same collectives."""
    from minifsdp.checks import collective_log, rank_checks
    from minifsdp.engine import messages

    counted = calls_by_file(action, counts)
    return sum(counted[module.__file__] for module in (collective_log, messages, rank_checks)) / NUM_UNITS


def main() -> None:
    import torch.distributed.fsdp as torch_fsdp
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import minifsdp
    from minifsdp.debugging import trace

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    makers: dict[str, Callable[[Any], nn.Module]] = {
        "fully_shard frees": lambda library: fully_sharded(library, keeps=False),
        "fully_shard keeps": lambda library: fully_sharded(library, keeps=True),
    }
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for kind in ("flat", "original"):
            makers[f"{strategy} {kind}"] = functools.partial(
                sharded, strategy=strategy, use_orig_params=kind == "original", device_id=torch.device("cpu")
            )
    answer: dict[str, Any] = {"costs": {}, "trace": {}, "ledger": {}}
    for key, make in makers.items():
        model = make(minifsdp)
        action = warmed_up(model)
        answer["trace"][key] = calls_by_file(action)[trace.__file__]
        answer["ledger"][key] = {counts: of_the_ledger(action, counts) for counts in ("call", "c_call")}
        answer["costs"][f"minifsdp {key}"] = costs(model)
        answer["costs"][f"torch {key}"] = costs(make(torch_fsdp))
    with trace.record():
        action = warmed_up(sharded(minifsdp, "FULL_SHARD"))
        answer["trace"]["recording"] = calls_by_file(action)[trace.__file__]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
