"""No tensor waits for the garbage collector, which can run much later than the memory is needed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from spec_tests.harness import device, ranks
from spec_tests.live_bytes import LiveBytes
from spec_tests.models.apis import Api, Function, all_apis
from spec_tests.models.modules import MLP, Block, seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy


@contextmanager
def left_in_cycles(live: LiveBytes) -> Iterator[list[int]]:
    """Adds the bytes of tensors that only the garbage collector frees after the block."""
    gc.collect()
    gc.disable()
    found: list[int] = []
    try:
        yield found
        before = live.now()
        gc.collect()
        found.append(before - live.now())
    finally:
        gc.enable()


def shard(api: Api) -> Any:
    """The model, sharded with an auto-wrap policy where the API has one."""
    if isinstance(api, Function):
        return api.shard()
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block, MLP}), "device_id": device()}
    return api.call(seeded(), use_orig_params=api.use_orig_params, **options)  # type: ignore[attr-defined]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model(batch(0))).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.state_dict()
    if isinstance(model, FullyShardedDataParallel):
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
    else:
        get_optimizer_state_dict(model, optimizer)


def clip(model: Any, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model(batch(0))).backward()
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(batch(0))


ACTIONS: dict[str, Callable[[Any, torch.optim.Optimizer], None]] = {
    "step": step, "save": save, "clip": clip, "evaluate": evaluate,
}  # fmt: skip


@pytest.mark.spec("COST-22")
@all_apis
@ranks(2)
def test_sharding_leaves_no_tensor_in_a_reference_cycle(api: Api) -> None:
    with LiveBytes() as live, left_in_cycles(live) as left:
        model = shard(api)
    assert left == [0]
    assert [*model.parameters()]


@pytest.mark.spec("COST-22")
@all_apis
@pytest.mark.parametrize("action", ACTIONS)
@ranks(2)
def test_use_of_a_model_leaves_no_tensor_in_a_reference_cycle(api: Api, action: str) -> None:
    with LiveBytes() as live:
        model = shard(api)
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer)
        with left_in_cycles(live) as left:
            ACTIONS[action](model, optimizer)
    assert left == [0]
