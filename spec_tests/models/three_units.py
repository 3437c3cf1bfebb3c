"""Ways to use a model of three units, with the numbers of their all-gathers and reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from spec_tests.harness import device
from spec_tests.models.modules import Twice, chain
from spec_tests.models.small import (
    draw,
    square_loss,
)
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, trace

FULL, KEEP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
each_strategy = pytest.mark.parametrize("strategy", [FULL, KEEP, NONE], ids=lambda s: s.name)
Wrap = Callable[[nn.Module], nn.Module]
REENTRANT, NO_REENTRANT = CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT


def wrapper(**options: Any) -> Wrap:
    return lambda module: FSDP(module, device_id=device(), **options)


def left_plain(module: nn.Module) -> nn.Module:
    return module


def from_an_input_with_gradient(model: nn.Module, rank: int) -> Tensor:
    # Reentrant checkpointing computes no gradients if no input requires a gradient.
    return model(draw(rank).requires_grad_()).square().mean()


def of_two_forwards(model: nn.Module, rank: int) -> Tensor:
    first, second = model(draw(rank)), model(draw(rank, step=1))
    return first.square().mean() + second.sin().mean()


def checkpointed(impl: CheckpointImpl, *, inside: bool) -> Callable[[Wrap], nn.Module]:
    def build(wrap: Wrap) -> nn.Module:
        blocks = []
        for block in chain():
            made = wrap(checkpoint_wrapper(block, impl)) if inside else checkpoint_wrapper(wrap(block), impl)
            blocks.append(made)
        return wrap(nn.Sequential(*blocks))

    return build


@dataclass(frozen=True)
class Case:
    """A way to use three units, and the numbers of all-gathers and reductions in one step."""

    name: str
    build: Callable[[Wrap], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    full_shard: tuple[int, int]
    shard_grad_op: tuple[int, int] = (3, 3)


def in_a_row(wrap: Wrap) -> nn.Module:
    return wrap(nn.Sequential(*map(wrap, chain())))


def each_twice(wrap: Wrap) -> nn.Module:
    return wrap(Twice([wrap(block) for block in chain()]))


def with_own_layer(wrap: Wrap) -> nn.Module:
    """Three blocks, followed by a layer that belongs to the root."""
    blocks = [wrap(block) for block in chain()]
    layer = nn.Linear(3, 2).to(device())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.25)
    return wrap(nn.Sequential(*blocks, layer))


CASES = {
    case.name: case
    for case in [
        Case("plain", in_a_row, square_loss, (6, 3)),
        Case("each block twice", each_twice, square_loss, (9, 3)),
        Case("two forwards, one backward", in_a_row, of_two_forwards, (9, 3)),
        Case("checkpoint inside", checkpointed(NO_REENTRANT, inside=True), square_loss, (6, 3)),
        Case("checkpoint around", checkpointed(NO_REENTRANT, inside=False), square_loss, (6, 3)),
        # torch all-gathers 9 times in these two cases.
        Case("reentrant inside", checkpointed(REENTRANT, inside=True), from_an_input_with_gradient, (6, 3)),
        Case("reentrant around", checkpointed(REENTRANT, inside=False), from_an_input_with_gradient, (6, 3)),
    ]
}


def without_waits(recorder: trace.Recorder) -> list[str]:
    """The order of events without waits. The waits depend on the rate limiter, which has its own tests."""
    return [word for word in recorder.order() if not word.startswith("WAIT")]
