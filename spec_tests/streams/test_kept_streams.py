"""A model that is converted between two steps keeps its communication streams, with the memory in their caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel


def step(model: nn.Module) -> None:
    model(torch.ones(8, 16, device=device())).sum().backward()
    model.zero_grad()


def streams_of(model: Any) -> list[Any]:
    comm_streams = model._unit.root.comm_streams
    return [comm_streams.all_gather.stream, comm_streams.reduce.stream, comm_streams.all_reduce.stream]


@pytest.mark.spec("STREAM-18")
@pytest.mark.accelerator
@ranks(2)
def test_converted_model_keeps_its_communication_streams() -> None:
    model = FullyShardedDataParallel(nn.Linear(16, 16).to(device()))
    step(model)
    before = streams_of(model)
    for _ in range(8):
        model.float()
        step(model)
    assert streams_of(model) == before


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
