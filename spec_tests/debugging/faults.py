"""Faults that are injected on one rank, and the warnings about them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.models.apis import FULLY_SHARD, Api


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings that this rank receives inside the block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(one.message) for one in caught if re.match(r"rank \d+: ", str(one.message)))


def on_rank(rank: int, spoil: Callable[[], Any]) -> None:
    if dist.get_rank() == rank:
        with torch.no_grad():
            spoil()


class Spoiler:
    """Replaces a value in a layer's output or in its gradient, on one rank, while ``is_armed`` is true."""

    def __init__(self, layer: nn.Module, rank: int, value: float, *, in_backward: bool) -> None:
        self.is_armed, self._is_here = True, dist.get_rank() == rank
        self._value, self._in_backward = value, in_backward
        layer.register_forward_hook(self._after)

    def _after(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not self.is_armed or not self._is_here:
            return None
        if self._in_backward:
            output.register_hook(self._spoiled)
            return None
        return self._spoiled(output)

    def _spoiled(self, tensor: Tensor) -> Tensor:
        spoiled = tensor.clone()
        spoiled[0, 0] = self._value
        return spoiled


def local_values(model: Any, api: Api, block: int) -> Tensor:
    """This rank's shard of a block, or of the block's weight. Not a copy."""
    if api == FULLY_SHARD:
        return model.blocks[block].linear.weight.to_local().detach()
    return model.module.blocks[block]._unit.layout.local_values()
