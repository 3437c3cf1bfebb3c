"""Streams of the program: a hook enters a communication stream again, and forwards run on several streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minifsdp.engine.comm_streams import CommStreams, current_stream
from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, fully_shard


@pytest.mark.accelerator
@pytest.mark.spec("STREAM-09")
@ranks(1)
def test_each_exit_restores_the_stream_from_before_its_entry() -> None:
    """Defect: the exits restore the streams in the order of the entries."""
    streams = CommStreams(device())
    outer, other = streams.reduce, streams.all_reduce
    before = current_stream(device())
    with outer:
        with other:
            with outer:
                assert current_stream(device()) == outer.stream
            assert current_stream(device()) == other.stream
        assert current_stream(device()) == outer.stream
        with outer:
            pass
        assert current_stream(device()) == outer.stream
    assert current_stream(device()) == before


@pytest.mark.simulated
@pytest.mark.spec("STREAM-04")
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
@ranks(2)
def test_memory_of_parameters_is_not_reused_before_every_stream_has_read_them(api: str) -> None:
    plain, module = nn.Linear(16, 16, device=device()), torch.get_device_module(device())
    if api == "wrapper":
        model: Any = FullyShardedDataParallel(plain, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    else:
        model = fully_shard(plain, reshard_after_forward=False)
    main, side, x = module.current_stream(), module.Stream(), torch.ones(4, 16, device=device())
    # Both forwards use the same unsharded parameters.
    outputs = [model(x)]
    side.wait_stream(main)
    with module.stream(side):
        outputs.append(model(x))
        (model._unit if api == "wrapper" else model).reshard()
    # The allocator can give the memory of the parameters to this tensor while the side stream reads them.
    torch.zeros(16 * 16 + 16, device=device())
    main.wait_stream(side)
