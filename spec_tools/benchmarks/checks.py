"""A step, or a start, with a check of ``minifsdp.debug()``: what every rank does.

`weights` and `meta` run at the beginning, so their *start* is measured: sharding the model and the first step. For
`meta`, the model is on the meta device and is materialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch.distributed as dist

import minifsdp
from minifsdp.checks.rank_checks import RankChecks
from minifsdp.debugging import switch
from minifsdp.engine.events import events, issue
from spec_tools.benchmarks.contenders import CONTENDERS, OURS, materialized
from spec_tools.benchmarks.workloads import WORKLOADS, adamw

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
    workload, by_function = WORKLOADS[name], api == "fully_shard"
    if is_meta:
        model = materialized(OURS, workload.model, workload.unit_class, by_function=by_function)
    else:
        contender = CONTENDERS["minifsdp FSDP2" if by_function else "minifsdp flat"]
        model = contender.take(workload.model(), workload).model
    (inputs, targets), *_ = workload.batches(0, dist.get_rank())
    optimizer = adamw(model)

    def training() -> None:
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()

    return training


def _nothing(*_: object) -> None:
    """Replaces methods that compare."""


@contextmanager
def without_ledger() -> Iterator[None]:
    """Disables the log of collectives and the comparisons of ranks. Use it around whole iterations, on every rank.

    Do not train with it: mismatched collectives are not detected. The watchdog keeps running; it waits in the store.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(events, "collective", issue))
        for name in ("forward_begins", "backward_begins", "backward_ends", "reduced", "left"):
            stack.enter_context(mock.patch.object(RankChecks, name, _nothing))
        yield
