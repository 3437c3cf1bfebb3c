"""A user's hook raises during gradient reduction. The engine does not release memory that a stream still reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.engine.comm_streams import CommStreams, current_stream
from spec_tests.harness import device, ranks
from spec_tests.models.sharding import grid_mesh
from spec_tests.models.whole import group_of, whole
from spec_tests.subject import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]
WIDTH = 16


class Broken(Exception):
    """The exception that the hooks of this file raise."""


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(device())


def rows(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device())


def backward(model: nn.Module, step: int) -> None:
    model(rows(step)).square().mean().backward()


def break_off(model: nn.Module) -> None:
    """Runs a backward in which a hook raises, then kernels that may reuse the memory that the backward released."""
    with pytest.raises(Broken):
        backward(model, 0)
    # Write immediately on the compute stream, without waiting for another stream.
    for numel in (WIDTH * WIDTH + WIDTH, WIDTH * (WIDTH + 1) // 2, WIDTH * WIDTH, WIDTH):
        for _ in range(4):
            torch.full((numel,), 7.0, device=device())


def assert_next_is_right(model: nn.Module) -> None:
    plain = layers()
    model.zero_grad()
    backward(model, 1)
    backward(plain, 1)
    found = full_gradients_of(model) if isinstance(model, FSDPModule) else whole_gradients(model)
    for name, parameter in plain.named_parameters():
        expected = parameter.grad.clone()
        dist.all_reduce(expected)
        torch.testing.assert_close(found[name].to(device()), expected / dist.get_world_size(), rtol=1e-4, atol=1e-6)


def full_gradients_of(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.grad.to(device()).full_tensor() for name, parameter in model.named_parameters()}


def whole_gradients(model: Any) -> dict[str, Tensor]:
    return whole(model, layers, (nn.Linear,), group=group_of(model.sharding_strategy))[1]


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function`` so that its second call raises after it has run."""
    calls = []

    def hook(*args: Any) -> Any:
        calls.append(1)
        result = function(*args)
        if len(calls) == 2:
            raise Broken
        return result

    return hook


def send(group: Any, gradient: Tensor, local_shard: Tensor | None = None) -> None:
    gradient.div_(dist.get_world_size(group))
    if local_shard is None:
        dist.all_reduce(gradient, group=group)
    else:
        dist.reduce_scatter(local_shard, list(gradient.chunk(dist.get_world_size(group))), group=group)


def wrapped(strategy: ShardingStrategy, **options: Any) -> FullyShardedDataParallel:
    options = {"sharding_strategy": strategy, "device_id": device(), **options}
    inner = nn.Sequential(*(FullyShardedDataParallel(layer, **options) for layer in layers()))
    return FullyShardedDataParallel(inner, **options)


def sharded(**options: Any) -> Any:
    model: Any = layers()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


@pytest.mark.spec("GRAD-05")
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_communication_hook_raises_after_it_has_sent(strategy: ShardingStrategy) -> None:
    model = wrapped(strategy)
    model.register_comm_hook(model.process_group, once(send))
    break_off(model)
    assert_next_is_right(model)


@pytest.mark.spec("GRAD-05")
@pytest.mark.parametrize("shape", ["sharded", "replicas", "stream", "offload"])
@ranks(4)
def test_an_all_reduce_hook_raises(shape: str) -> None:
    options: dict[str, Any] = {"mesh": grid_mesh()} if shape == "replicas" else {}
    if shape == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device().type != "cpu")
    model = sharded(**options)
    hook = once(lambda reduced: reduced.mul_(1.0))
    stream = torch.get_device_module(device()).Stream() if shape == "stream" and device().type != "cpu" else None
    for layer in model:
        layer.set_all_reduce_hook(hook, stream=stream)
    break_off(model)
    assert_next_is_right(model)


@pytest.mark.spec("GRAD-05")
@pytest.mark.parametrize("api", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("offload", [False, True])
@ranks(2)
def test_a_post_accumulate_grad_hook_raises(api: str, offload: bool) -> None:
    if api == "wrapper":
        model: Any = wrapped(
            ShardingStrategy.FULL_SHARD, use_orig_params=True, cpu_offload=CPUOffload(offload_params=offload)
        )
    else:
        pins = device().type != "cpu"
        model = sharded(**({"offload_policy": CPUOffloadPolicy(pin_memory=pins)} if offload else {}))
    hook = once(lambda parameter: parameter.grad.mul_(1.0))
    for name, parameter in model.named_parameters():
        # Each rank has a shard of each weight.
        if name.endswith("weight"):
            parameter.register_post_accumulate_grad_hook(hook)
    break_off(model)
    assert_next_is_right(model)


@pytest.mark.spec("GRAD-05")
@ranks(1)
def test_nested_contexts_of_one_stream_restore_the_previous_stream() -> None:
    comm_streams = CommStreams(device())
    if comm_streams.reduce.stream is None:
        return
    before = current_stream(device())
    with comm_streams.reduce:
        with comm_streams.all_gather, comm_streams.reduce:
            assert current_stream(device()) == comm_streams.reduce.stream
        assert current_stream(device()) == comm_streams.reduce.stream
    assert current_stream(device()) == before != comm_streams.reduce.stream
