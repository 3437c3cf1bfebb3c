"""A user's hook raises during gradient reduction. The engine does not release memory that a stream still reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.engine.comm_streams import CommStreams, current_stream
from spec_tests.harness import device, ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, WRAPPED, Api
from spec_tests.models.modules import seeded
from spec_tests.models.running import iterate
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD, NO_SHARD
from spec_tests.models.values import assert_same, mean_gradients
from spec_tests.subject import CPUOffloadPolicy, ShardingStrategy


class Broken(Exception):
    """The exception that the hooks of this file raise."""


def raising(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function`` so that its second call raises after it has run."""
    calls = []

    def hook(*args: Any) -> Any:
        calls.append(1)
        result = function(*args)
        if len(calls) == 2:
            raise Broken
        return result

    return hook


def assert_recovers(api: Api, model: Any) -> None:
    """Runs a backward in which a hook raises. Then checks the gradients of the next iteration."""
    with pytest.raises(Broken):
        iterate(model)
    # Write immediately on the compute stream, without waiting for another stream, to memory that may be reused: as much
    # as shards and unsharded gradients of blocks and of the root, of their weights and biases.
    for numel in (6, 12, 18, 21, 28, 36, 42, 56):
        for _ in range(4):
            torch.full((numel,), 7.0, device=device())
    model.zero_grad()
    iterate(model, 1)
    assert_same(api.gradients(model), mean_gradients(seeded(), [1]), bitwise=False)


@pytest.mark.spec("GRAD-05")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@ranks(2)
def test_a_communication_hook_raises_after_it_has_sent(strategy: ShardingStrategy) -> None:
    def average(group: Any, gradient: Tensor, local_shard: Tensor | None = None) -> None:
        gradient.div_(dist.get_world_size(group))
        if local_shard is None:
            dist.all_reduce(gradient, group=group)
        else:
            dist.reduce_scatter(local_shard, list(gradient.chunk(2)), group=group)

    model = WRAPPED.shard(strategy=strategy)
    model.register_comm_hook(model.process_group, raising(average))
    assert_recovers(WRAPPED, model)


@pytest.mark.spec("GRAD-05")
@pytest.mark.parametrize("how", ["sharded", "replicas", "stream", "offload"])
@ranks(4)
def test_an_all_reduce_hook_raises(how: str) -> None:
    on_cpu = device().type == "cpu"
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=not on_cpu)} if how == "offload" else {}
    model = FULLY_SHARD.shard(strategy=HYBRID_SHARD if how == "replicas" else FULL_SHARD, **options)
    stream = torch.get_device_module(device()).Stream() if how == "stream" and not on_cpu else None
    hook = raising(lambda reduced: reduced.mul_(1.0))
    for block in model.blocks:
        block.set_all_reduce_hook(hook, stream=stream)
    assert_recovers(FULLY_SHARD, model)


@pytest.mark.spec("GRAD-05")
@pytest.mark.parametrize("api", [ORIGINALS, FULLY_SHARD], ids=str)
@pytest.mark.parametrize("offload", [False, True])
@ranks(2)
def test_a_post_accumulate_grad_hook_raises(api: Api, offload: bool) -> None:
    options: dict[str, Any] = {"offload": offload}
    if offload and api == FULLY_SHARD:
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=device().type != "cpu")}
    model = api.shard(**options)
    hook = raising(lambda parameter: parameter.grad.mul_(1.0))
    for name, parameter in model.named_parameters():
        # Each rank has a shard of each weight.
        if name.endswith("weight"):
            parameter.register_post_accumulate_grad_hook(hook)
    assert_recovers(api, model)


@pytest.mark.spec("GRAD-05")
@pytest.mark.accelerator
@ranks(1)
def test_nested_contexts_of_one_stream_restore_the_previous_stream() -> None:
    comm_streams = CommStreams(device())
    before = current_stream(device())
    with comm_streams.reduce:
        with comm_streams.all_gather, comm_streams.reduce:
            assert current_stream(device()) == comm_streams.reduce.stream
        assert current_stream(device()) == comm_streams.reduce.stream
    assert current_stream(device()) == before != comm_streams.reduce.stream
