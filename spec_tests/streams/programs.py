"""Small programs that together use all waits between streams in training.

Each builds a model on the device with one of the two front ends, trains two or three steps in one configuration, and
returns tensors for a comparison bit by bit. The broken engines run these programs (see ``spec_tools/breaks``). If no
program needs a wait, its removal cannot be detected. A program runs as rank 0 of a group whose other ranks are fake
ranks.

Spec: SIM-07.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifsdp import token_weighted, while_all_have_data
from minifsdp.checks.collective_log import log
from minifsdp.engine.events import events
from minifsdp.watchdog import watchdog
from spec_tests.harness.simulated import WORLD
from spec_tests.harness.simulated.capture import MODES
from spec_tests.models.torch_names import reduce_scatter_single
from spec_tests.streams.parts import (
    DEVICE,
    Checkpointed,
    Failure,
    ScaledInt8,
    Shortened,
    accumulating,
    assign_new_data,
    batch,
    blocks,
    chain,
    each,
    evaluate,
    extended_chain,
    fail_in_backward,
    flat,
    local,
    loss_of,
    prefetching_in_vain,
    recomputed,
    scaled,
    sgd,
    shown,
    step_in_backward,
    train,
    trained,
    trained_extended,
    use_threads,
    with_kept_gradients,
    with_new_data,
)
from spec_tests.subject import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from spec_tests.subject import FullyShardedDataParallel as FSDP

__all__ = ["PROGRAMS", "Program"]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

OFFLOAD: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=True)}
OFFLOAD_EACH: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
NOT_PINNED: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
NOT_SHARDED: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD}
IN_BF16: dict[str, Any] = {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=F32)}
SUMMED_IN_BF16: dict[str, Any] = {"mixed_precision": MixedPrecision(param_dtype=BF16)}
EACH_IN_BF16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)}
SUMMED_IN_F16: dict[str, Any] = {"mixed_precision": MixedPrecision(reduce_dtype=F16)}
EACH_SUMMED_IN_F16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=F16)}
EACH_SUMMED_IN_BF16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        num_ranks: size of its process group.
        run: builds, trains, and returns the tensors that are compared.
    """

    num_ranks: int
    run: Callable[[], list[Tensor]]


PROGRAMS: dict[str, Program] = {}


def program(num_ranks: int) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Adds a function to `PROGRAMS`. The function returns a model, or the tensors to compare."""

    def decorate(body: Callable[[], Any]) -> Callable[[], Any]:
        add_program(body.__name__, num_ranks, body)
        return body

    return decorate


def add_program(name: str, num_ranks: int, body: Callable[[], Any]) -> None:
    def run() -> list[Tensor]:
        found = body()
        return shown(found) if isinstance(found, nn.Module) else list(found)

    PROGRAMS[name] = Program(num_ranks, run)


# --- programs that only train a model ---

for name, num_ranks, body in (
    ("flat_full", 2, lambda: trained(flat(), 3)),
    ("flat_full_of_many_blocks", 2, lambda: trained(flat(chain(num_blocks=8)))),
    ("flat_alone_in_bf16", 1, lambda: trained(flat(**IN_BF16))),
    ("flat_offload", 2, lambda: trained(flat(**OFFLOAD))),
    ("flat_not_sharded_offload", 2, lambda: trained(flat(**NOT_SHARDED, **OFFLOAD))),
    ("flat_offload_accumulating", 2, lambda: accumulating(flat(**OFFLOAD))),
    ("flat_offload_with_kept_gradients", 2, lambda: with_kept_gradients(flat(**OFFLOAD))),
    ("flat_new_data", 2, lambda: with_new_data(flat(use_orig_params=True))),
    # A block is all-gathered for its first use while the optimizer uses the gradients of its second use.
    ("originals_used_twice_with_the_optimizer_in_backward", 2, lambda: step_in_backward(recomputed())),
    ("originals_offload_used_twice_with_the_optimizer_in_backward", 2, lambda: step_in_backward(recomputed(**OFFLOAD))),
    ("each_full", 2, lambda: trained(each(), 3)),
    ("each_resting", 4, lambda: trained(each(reshard_after_forward=2), 3)),
    ("each_hybrid", 4, lambda: trained(each(shape=(2, 2)))),
    ("each_hybrid_in_float16", 4, lambda: trained(each(shape=(2, 2), **EACH_SUMMED_IN_F16))),
    ("each_hybrid_offload_in_bf16", 4, lambda: trained(each(shape=(2, 2), **EACH_IN_BF16, **OFFLOAD_EACH), 3)),
    ("each_alone_in_bf16", 1, lambda: trained(each(**EACH_IN_BF16))),
    ("each_offload", 2, lambda: trained(each(**OFFLOAD_EACH))),
    ("each_offload_in_bf16", 2, lambda: trained(each(**EACH_SUMMED_IN_BF16, **OFFLOAD_EACH))),
    ("each_offload_not_pinned_accumulating", 2, lambda: accumulating(each(**NOT_PINNED))),
    ("each_prefetching_in_vain", 2, lambda: trained(prefetching_in_vain(), 1)),
    ("each_offload_prefetching_in_vain", 2, lambda: scaled(trained(prefetching_in_vain(**OFFLOAD_EACH), 1), 0.5)),
):
    add_program(name, num_ranks, body)


# --- FSDP1 ---


@program(2)
def flat_offload_no_sync() -> Any:
    model = flat(use_orig_params=True, **NOT_SHARDED, **OFFLOAD)
    optimizer = sgd(model)
    with model.no_sync():
        loss_of(model).backward()
    train(model, 1, optimizer)
    return model


@program(2)
def flat_after_an_error_in_backward() -> Any:
    model = flat(**SUMMED_IN_BF16)
    optimizer = train(model, 1)
    fail_in_backward(model)
    optimizer.zero_grad()
    train(model, 1, optimizer)
    return model


@program(2)
def originals_offload_after_an_error_in_backward() -> Any:
    """Assigned data is copied into shards that the interrupted backward is still copying to the device."""
    model = flat(use_orig_params=True, **OFFLOAD)
    optimizer = train(model, 1)
    fail_in_backward(model)
    assign_new_data(model)
    train(model, 1, optimizer)
    return model


@program(2)
def originals_offload_on_another_device_after_an_error() -> Any:
    torch.get_device_module(DEVICE).set_device(1)
    return originals_offload_after_an_error_in_backward()


@program(2)
def flat_hook() -> Any:
    model = flat()

    def hook(_: Any, whole: Tensor, local_shard: Tensor) -> None:
        local_shard.copy_(whole.view(2, -1)[0])
        local_shard.div_(2)

    model.register_comm_hook(None, hook)
    return trained(model)


@program(2)
def flat_evaluating_on_a_stream_of_the_user() -> Any:
    model = flat()
    optimizer = train(model, 1)
    module = torch.get_device_module(DEVICE)
    main, side = module.current_stream(), module.Stream()
    side.wait_stream(main)
    with module.stream(side):
        output = evaluate(model)
    main.wait_stream(side)
    train(model, 1, optimizer)
    return [*shown(model), output]


@program(2)
def flat_loss_abandoned_with_a_block_left_out() -> Any:
    """The optimizer writes to shards that were prefetched for the skipped block."""
    model = flat(Shortened(*chain()), forward_prefetch=True)
    optimizer = train(model, 1)
    loss_of(model).backward()
    model(batch(), num_blocks=1)
    optimizer.step()
    return model


@program(2)
def flat_pinned_batch() -> Any:
    """One pinned buffer for all batches, which is refilled while the step before may still be running."""
    # The order check of the first step and the limiter stop the CPU, which could hide the race. So there is no limiter,
    # and there are more steps.
    model = flat(limit_all_gathers=False)
    optimizer = sgd(model)
    buffer = torch.empty(6, 5).pin_memory()
    for step in range(3):
        buffer.fill_(step + 1.0)
        model(buffer).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(2)
def flat_on_another_device_than_the_current() -> Any:
    torch.get_device_module(DEVICE).set_device(1)
    model = flat(**SUMMED_IN_BF16)
    optimizer = train(model, 1)
    output = evaluate(model)
    train(model, 1, optimizer)
    return [*shown(model), output]


@program(2)
def flat_over_a_backend_with_threads() -> Any:
    use_threads()
    model = flat(sync_module_states=True)
    train(model)
    with FSDP.summon_full_params(model, writeback=False):
        whole = [parameter.detach().clone() for parameter in model.parameters()]
    return [*shown(model), *whole]


@program(2)
def flat_gradients_over_a_backend_with_threads() -> Any:
    use_threads()
    model = flat(use_orig_params=True)
    loss_of(model).backward()
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        whole = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*shown(model), *whole]


# --- FSDP2 ---


@program(4)
def hybrid_over_a_backend_with_threads() -> Any:
    use_threads()
    return trained(each(shape=(2, 2)))


@program(4)
def each_hybrid_partial() -> Any:
    model = each(shape=(2, 2))
    optimizer = sgd(model)
    for _ in range(2):
        model.set_requires_all_reduce(False)
        loss_of(model).backward()
        model.set_requires_all_reduce(True)
        train(model, 1, optimizer)
    return model


@program(2)
def each_offload_evaluated_and_changed() -> Any:
    model = each(**OFFLOAD_EACH)
    evaluate(model)
    return trained(scaled(model, 2))


@program(2)
def flat_after_an_error_in_a_hook() -> Any:
    """A hook raises after it has issued its collective. Later kernels may reuse the memory that backward has freed."""
    model, has_failed = flat(), []

    def hook(_: Any, whole: Tensor, local_shard: Tensor) -> None:
        reduce_scatter_single(local_shard, whole)
        if not has_failed:
            has_failed.append(True)
            raise Failure

    model.register_comm_hook(None, hook)
    loss = loss_of(model)
    with contextlib.suppress(Failure):
        loss.backward()
    for numel in (82, 84, 42):
        for _ in range(4):
            torch.full((numel,), 7.0, device=DEVICE)
    model.zero_grad()
    return trained(model, 1)


@program(2)
def each_after_an_abort() -> Any:
    """The watchdog has aborted a collective that could not complete. The optimizer must not use its output."""
    group: Any = dist.new_group([0, 1])
    model = fully_shard(chain(), mesh=DeviceMesh.from_group(group, "sim"))
    optimizer = train(model, 1)
    group.lose_peers()
    loss_of(model).backward()
    group.abort()
    # Forward and backward have read the output before.
    WORLD.races.clear()
    log.fatal_error = "a collective was aborted"
    try:
        with contextlib.suppress(RuntimeError):
            optimizer.step()
    finally:
        log.fatal_error = ""
    return [local(parameter.detach()) for parameter in model.parameters()]


@program(2)
def each_captured_beside_the_watchdog() -> Any:
    """The watchdog's thread queries the last event while the main thread captures a graph."""
    model, module = each(), torch.get_device_module(DEVICE)
    train(model, 1)
    exchange = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int))(
        lambda mode: module.exchange_capture_mode(MODES[mode[0]]) and None
    )
    library = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    with mock.patch("ctypes.CDLL", return_value=library), ThreadPoolExecutor(1) as thread:  # noqa: SIM117
        with module.graph(module.CUDAGraph()):
            thread.submit(watchdog._is_complete, events.last_event).result(timeout=30)
    return model


@program(2)
def flat_offload_on_a_stream_of_the_user() -> Any:
    """The whole step runs on a stream of the user."""
    model, module = flat(**OFFLOAD), torch.get_device_module(DEVICE)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        train(model)
    return model


@program(2)
def each_on_a_stream_of_the_user() -> Any:
    """Forward, its backward and the optimizer run on a stream of the user."""
    model = each()
    optimizer, module = sgd(model), torch.get_device_module(DEVICE)
    main, side = module.current_stream(), module.Stream()
    for _ in range(3):
        side.wait_stream(main)
        with module.stream(side):
            loss = loss_of(model)
        main.wait_stream(side)
        loss.backward()
        side.wait_stream(main)
        with module.stream(side):
            optimizer.step()
            optimizer.zero_grad()
    main.wait_stream(side)
    return model


@program(2)
def each_resharded_on_another_stream() -> Any:
    """Blocks that stay unsharded are used on two streams, and freed on the second one."""
    model, module = each(reshard_after_forward=False), torch.get_device_module(DEVICE)
    main, side = module.current_stream(), module.Stream()
    losses = [loss_of(model)]
    side.wait_stream(main)
    with module.stream(side):
        losses.append(loss_of(model))
        for one in model.modules():
            if hasattr(one, "reshard"):
                one.reshard()
    # The allocator can give the memory of the parameters to these tensors.
    losses += [torch.zeros(size, device=DEVICE) for size in range(16, 512, 16)]
    main.wait_stream(side)
    return losses


@program(2)
def each_used_often_with_the_optimizer_in_backward() -> Any:
    """The optimizer uses the gradients of the last use while the block is all-gathered for the first use."""
    model = chain(Checkpointed, num_blocks=1)
    for _ in range(3):
        model.insert(1, model[1])
    return step_in_backward(each(model))


@program(2)
def each_by_hand() -> Any:
    model = each()
    optimizer = sgd(model)
    handle = model.unshard(async_op=True)
    for block in blocks(model)[:2]:
        block.unshard(async_op=True)
    handle.wait()
    train(model, 1, optimizer)
    # Unsharded without use, and resharded before any wait.
    blocks(model)[0].unshard(async_op=True)
    blocks(model)[0].reshard()
    blocks(model)[1].unshard()
    train(model, 1, optimizer)
    return [*shown(model), evaluate(model)]


@program(2)
def each_by_hand_and_read() -> Any:
    """Reads the unsharded parameters, as an export does."""
    model = each()
    train(model, 1)
    model.unshard()
    for block in blocks(model):
        block.unshard(async_op=True).wait()
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    for part in [model, *blocks(model)]:
        part.reshard()
    return [*shown(model), *map(local, whole)]


@program(2)
def each_prefetching() -> Any:
    model = each()
    parts = blocks(model)
    for index, part in enumerate(parts):
        part.set_modules_to_forward_prefetch(parts[index + 1 : index + 3])
        part.set_modules_to_backward_prefetch(parts[max(0, index - 2) : index][::-1])
    return trained(model)


@program(2)
def each_after_an_event() -> Any:
    """Work on the compute stream after the optimizer does not delay the next all-gathers."""
    model = each()
    optimizer = sgd(model)
    other = torch.ones(8, device=DEVICE)
    for _ in range(2):
        train(model, 1, optimizer)
        model.set_post_optim_event(torch.get_device_module(DEVICE).current_stream().record_event())
        other.mul_(2)
    # Without an event, the next forward waits for all work on the compute stream.
    train(model, 2, optimizer)
    return model


@program(2)
def each_assigned_after_an_event() -> Any:
    """Data that is assigned after the event was recorded must also be copied after its own computation."""
    model = each()
    optimizer = train(model, 1)
    model.set_post_optim_event(torch.get_device_module(DEVICE).current_stream().record_event())
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    loss_of(model).backward()
    del optimizer
    return model


@program(2)
def each_with_single_parameters() -> Any:
    """Units of one parameter each: the all-gather output needs no copy-out."""
    with torch.device(DEVICE):
        model = nn.Sequential(*[nn.Linear(5, 5, bias=False) for _ in range(4)])
    for part in [*model, model]:
        fully_shard(part, mesh=init_device_mesh("sim", (2,)))
    return trained(model, 3)


@program(2)
def each_with_a_hook_on_its_own_stream() -> Any:
    model = each()
    stream = torch.get_device_module(DEVICE).Stream()
    for part in [model, *blocks(model)]:
        part.set_all_reduce_hook(lambda local_shard: local_shard.mul_(0.5), stream=stream)
    return trained(model)


@program(2)
def each_in_batches_of_tokens() -> Any:
    """Unequal numbers of batches, and losses weighted by their numbers of tokens."""
    model = each()
    optimizer = sgd(model)
    for number in while_all_have_data([3, 2]):
        tokens = torch.full((), number, device=DEVICE)
        token_weighted(loss_of(model), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# --- FSDP2 with an all-gather extension ---

for name, num_ranks, body in (
    # Without biases: their buffers would also keep the memory of the metadata alive long enough.
    ("each_extended_with_metadata", 2, lambda: trained_extended(extended_chain(ScaledInt8, bias=False), 3)),
    ("each_extended_alone", 1, lambda: trained_extended(extended_chain())),
    ("each_extended_offload", 2, lambda: trained_extended(extended_chain(), **OFFLOAD_EACH)),
):
    add_program(name, num_ranks, body)
