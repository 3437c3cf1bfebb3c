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


def spoil(layer: nn.Module, rank: int, value: complex, *, in_backward: bool = False) -> Any:
    """On one rank, replaces a value in a layer's output or in its gradient. Returns a handle, which ends this."""

    def spoiled(tensor: Tensor) -> Tensor:
        copied = tensor.clone()
        copied[0, 0] = value
        return copied

    def after(_: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if dist.get_rank() != rank:
            return None
        if in_backward:
            output.register_hook(spoiled)
            return None
        return spoiled(output)

    return layer.register_forward_hook(after)
