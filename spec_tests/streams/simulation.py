"""Helpers for the tests of the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests.harness import device, simulated

WORLD = simulated.WORLD


def kinds() -> list[str]:
    """The kinds of the races so far. Clears the races, so that they do not fail the test."""
    found = [race.kind for race in WORLD.races.values()]
    WORLD.races.clear()
    return found


def module() -> Any:
    return torch.get_device_module(device())


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, device=device(), dtype=dtype)


def add_on_new_stream(x: torch.Tensor) -> Any:
    """Adds 1 to ``x`` on a new stream, which has waited for the current stream. Returns the stream."""
    side = module().Stream()
    side.wait_stream(module().current_stream())
    with module().stream(side):
        x.add_(1)
    return side


with_and_without_the_wait = pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
