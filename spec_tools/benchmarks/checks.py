"""A step, or a start, with a check of ``minifsdp.debug()``: what every rank does.

`weights` and `meta` run at the beginning, so their *start* is measured: sharding the model and the first step. For
`meta`, the model is on the meta device and is materialized.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minifsdp
from minifsdp.debugging import switch
from spec_tests.oracles.gathering import wrap_units
from spec_tools.benchmarks.without_ledger import without_ledger
from spec_tools.benchmarks.workloads import WORKLOADS, adamw

CPU = torch.device("cpu")
APIS = ("FullyShardedDataParallel", "fully_shard")
CHECKS = (*switch.CHECKS, "all")
AT_START = ("weights", "meta", "all")
# The engine without its permanent checks, without a check, and without a check on a model that was on meta.
OFF = ("no ledger", "off", "off, meta")


def active(check: str) -> AbstractContextManager[Any]:
    """The context in which only this check runs; one of `CHECKS` or of `OFF`."""
    if check == "no ledger":
        return without_ledger()
    if check in OFF:
        return nullcontext()
    return minifsdp.debug(*(() if check == "all" else (check,)))


def step(timer: Callable[..., None], name: str, api: str, check: str) -> None:
    """Times a step."""
    # Outside, because the first model turns the permanent checks on.
    training = _started(name, api, is_meta=False)
    with active(check):
        for _ in range(3):
            training()
        timer(training)


def start(timer: Callable[..., None], name: str, api: str, check: str) -> None:
    """Times sharding the model and the first step."""
    with active(check):
        timer(lambda: _started(name, api, is_meta="meta" in check)())


def _started(name: str, api: str, *, is_meta: bool) -> Callable[[], None]:
    workload = WORKLOADS[name]
    model = _sharded(name, api, is_meta=is_meta)
    (inputs, targets), *_ = workload.batches(0, dist.get_rank())
    optimizer = adamw(model)

    def training() -> None:
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()

    return training


def _sharded(name: str, api: str, *, is_meta: bool) -> nn.Module:
    """The sharded model. A model on the meta device is materialized, with the same values on all ranks."""
    workload = WORKLOADS[name]
    with torch.device("meta") if is_meta else nullcontext():
        model = workload.model()
    if api == "fully_shard":
        sharded: nn.Module = wrap_units(model, (workload.unit_class,), minifsdp.fully_shard)
        return sharded.to_empty(device=CPU).apply(_set) if is_meta else sharded
    options: dict[str, Any] = {"param_init_fn": _make_real if is_meta else None, "device_id": CPU}
    wrapped: nn.Module = wrap_units(
        model, (workload.unit_class,), lambda unit: minifsdp.FullyShardedDataParallel(unit, **options)
    )
    return wrapped


def _make_real(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    _set(module)


def _set(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            getattr(tensor, "_local_tensor", tensor).fill_(0.02)
