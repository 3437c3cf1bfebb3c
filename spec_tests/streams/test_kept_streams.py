"""A model that is converted between two steps keeps its communication streams, with the memory in their caches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel


def step(model: nn.Module) -> None:
    model(torch.ones(8, 16, device=device())).sum().backward()
    model.zero_grad()


@pytest.mark.spec("STREAM-18")
@pytest.mark.accelerator
@ranks(2)
def test_converted_model_keeps_its_communication_streams() -> None:
    model, module = FullyShardedDataParallel(nn.Linear(16, 16).to(device())), torch.get_device_module(device())
    step(model)
    made: list[Any] = []
    new = module.Stream

    def stream(*args: Any, **kwargs: Any) -> Any:
        # With an ID, it only refers to a stream that exists, as in `torch.cuda.current_stream`.
        if "stream_id" not in kwargs:
            made.append((args, kwargs))
        return new(*args, **kwargs)

    with mock.patch.object(module, "Stream", stream):
        for _ in range(8):
            model.float()
            step(model)
    assert made == []


@pytest.mark.spec("STREAM-18")
@pytest.mark.gpu
@ranks(2)
def test_memory_of_converted_model_does_not_grow() -> None:
    model = FullyShardedDataParallel(nn.Linear(16, 100_000).to(device()))
    step(model)
    reserved = []
    for _ in range(8):
        model.float()
        step(model)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]
