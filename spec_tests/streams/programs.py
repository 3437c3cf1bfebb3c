"""Small programs that together use all waits between streams in training.

Each builds a model on the device with one of the two front ends, trains two or three steps in one configuration, and
returns tensors for a comparison bit by bit. The broken engines run these programs (see ``breaks.py``). If no program
needs a wait, its removal cannot be detected. A program runs as rank 0 of a group whose other ranks are fake ranks.

The blocks have 82 parameters each, with shapes that do not divide evenly, so that there is padding.

Spec: SIM-07.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from minifsdp import token_weighted, while_all_have_data
from minifsdp.checkpoint import agreement
from spec_tests.fsdp2.int8_shards import Int8Shards, extended
from spec_tests.harness.simulated.nccl import SimulatedNccl
from spec_tests.models.modules import MLP
from spec_tests.subject import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
)
from spec_tests.subject import FullyShardedDataParallel as FSDP

__all__ = ["PROGRAMS", "Program"]

DEVICE = "sim:0"  # a string: on a machine without the simulation, torch does not support this device
BF16, F32 = torch.bfloat16, torch.float32


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
        def run() -> list[Tensor]:
            found = body()
            return shown(found) if isinstance(found, nn.Module) else list(found)

        PROGRAMS[body.__name__] = Program(num_ranks, run)
        return body

    return decorate


def shown(model: nn.Module) -> list[Tensor]:
    """The local shards of all parameters and of all existing gradients."""
    stored = list(model.parameters())
    stored += [parameter.grad for parameter in stored if parameter.grad is not None]
    return [local(tensor.detach()) for tensor in stored]


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# --- models ---


class Checkpointed(MLP):
    """A block that is recomputed in backward."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inner = super().forward
        return torch.as_tensor(checkpoint(inner, x, use_reentrant=self.is_reentrant, preserve_rng_state=False))


class CheckpointedReentrantly(Checkpointed):
    """The same with reentrant checkpointing."""

    is_reentrant = True


def chain(kind: type[MLP] = MLP, num_blocks: int = 3) -> nn.Sequential:
    with torch.device(DEVICE):
        return nn.Sequential(nn.Linear(5, 5), *[kind(5, 7) for _ in range(num_blocks)], nn.Linear(5, 3))


def flat(model: nn.Module | None = None, **options: Any) -> FSDP:
    """Wraps the blocks and the model with FSDP1."""
    policy = ModuleWrapPolicy({MLP, Checkpointed})
    options = {"device_id": torch.device(DEVICE), "auto_wrap_policy": policy, **options}
    return FSDP(model or chain(), **options)


def each(model: nn.Module | None = None, shape: tuple[int, ...] | None = None, **options: Any) -> Any:
    """Shards the blocks and the model with FSDP2."""
    model = model or chain()
    mesh = init_device_mesh("sim", shape or (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **{k: v for k, v in options.items() if k != "reshard_after_forward"})


def blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MLP)]


def batch() -> Tensor:
    return torch.randn(6, 5, device=DEVICE)


def loss_of(model: nn.Module) -> Tensor:
    return torch.as_tensor(model(batch()).square().sum())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: nn.Module, num_steps: int = 2, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Trains ``num_steps`` steps and returns the optimizer."""
    optimizer = optimizer or sgd(model)
    for _ in range(num_steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def trained(model: Any, num_steps: int = 2) -> Any:
    train(model, num_steps)
    return model


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(batch()))


# --- FSDP1: strategies ---


@program(2)
def flat_full() -> Any:
    return trained(flat(), 3)


@program(2)
def flat_full_of_many_blocks() -> Any:
    return trained(flat(chain(num_blocks=8)))


@program(2)
def flat_prefetching_without_limit() -> Any:
    return trained(flat(limit_all_gathers=False, forward_prefetch=True), 3)


@program(2)
def flat_zero2() -> Any:
    return trained(flat(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


@program(2)
def flat_not_sharded_in_bf16() -> Any:
    precision = MixedPrecision(param_dtype=BF16)
    return trained(flat(sharding_strategy=ShardingStrategy.NO_SHARD, mixed_precision=precision))


@program(2)
def flat_in_float16() -> Any:
    """The gradients are divided before and after their sum."""
    return trained(flat(mixed_precision=MixedPrecision(reduce_dtype=torch.float16)))


@program(2)
def flat_originals_in_bf16() -> Any:
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=F32)
    return trained(flat(use_orig_params=True, mixed_precision=precision))


@program(4)
def flat_hybrid() -> Any:
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicas", "shards"))
    return trained(flat(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh))


@program(1)
def flat_alone_in_bf16() -> Any:
    return trained(flat(mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32)))


@program(2)
def flat_from_rank_0() -> Any:
    return trained(flat(sync_module_states=True), 1)


# --- FSDP1: offload ---


@program(2)
def flat_offload() -> Any:
    return trained(flat(cpu_offload=CPUOffload(True)))


@program(2)
def flat_not_sharded_offload() -> Any:
    return trained(flat(sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=CPUOffload(offload_params=True)))


@program(2)
def flat_offload_in_bf16() -> Any:
    return trained(flat(cpu_offload=CPUOffload(True), mixed_precision=MixedPrecision(param_dtype=BF16)))


@program(2)
def flat_offload_accumulating() -> Any:
    model = flat(cpu_offload=CPUOffload(True))
    optimizer = sgd(model)
    loss_of(model).backward()
    train(model, 2, optimizer)
    return model


@program(2)
def flat_offload_with_kept_gradients() -> Any:
    """The program keeps the gradients of the first step while later steps make new ones."""
    return with_kept_gradients(flat(cpu_offload=CPUOffload(True)))


@program(2)
def each_offload_with_kept_gradients() -> Any:
    return with_kept_gradients(each(offload_policy=CPUOffloadPolicy()))


def with_kept_gradients(model: Any) -> list[Tensor]:
    loss_of(model).backward()
    kept = [local(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    train(model, 2)
    return [*shown(model), *kept]


@program(2)
def flat_offload_no_sync() -> Any:
    model = flat(cpu_offload=CPUOffload(True), use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = sgd(model)
    with model.no_sync():
        loss_of(model).backward()
    train(model, 1, optimizer)
    return model


@program(2)
def flat_offload_clipping() -> Any:
    model = flat(cpu_offload=CPUOffload(True))
    optimizer = sgd(model)
    loss_of(model).backward()
    model.clip_grad_norm_(0.1)
    optimizer.step()
    return model


@program(2)
def originals_offload_after_an_error_in_backward() -> Any:
    """Assigned data is copied into shards that the interrupted backward is still copying to the device."""
    model = flat(cpu_offload=CPUOffload(True), use_orig_params=True)
    optimizer = train(model, 1)
    fail_in_backward(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    train(model, 1, optimizer)
    return model


# --- FSDP1: actions of users ---


@program(2)
def flat_hook() -> Any:
    model = flat()

    def hook(_: Any, whole: Tensor, local_shard: Tensor) -> None:
        local_shard.copy_(whole.view(2, -1)[0])
        local_shard.div_(2)

    model.register_comm_hook(None, hook)
    return trained(model)


@program(2)
def flat_new_data() -> Any:
    model = flat(use_orig_params=True)
    optimizer = train(model, 1)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    train(model, 1, optimizer)
    return model


@program(1)
def flat_new_data_not_sharded() -> Any:
    model = flat()
    optimizer = train(model, 1)
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    train(model, 1, optimizer)
    return model


@program(2)
def flat_new_data_after_a_forward() -> Any:
    """Data assigned during an iteration: backward all-gathers it, although no stream has waited since forward."""
    model = flat(use_orig_params=True)
    loss = loss_of(model)
    for block in blocks(model):
        for parameter in block.parameters():
            parameter.data = parameter.data * 2
    loss.backward()
    return model


@program(2)
def flat_no_sync() -> Any:
    model = flat()
    optimizer = sgd(model)
    with model.no_sync():
        loss_of(model).backward()
    train(model, 2, optimizer)
    return model


@program(2)
def flat_evaluating() -> Any:
    model = flat()
    optimizer = train(model, 1)
    first = evaluate(model)
    train(model, 1, optimizer)
    return [*shown(model), first, evaluate(model)]


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
def each_on_a_stream_of_the_user() -> Any:
    """Forward and optimizer run on a stream of the user. The simulation runs backward on the default stream."""
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
def flat_loss_abandoned() -> Any:
    """A forward without a backward, then a step: the root is still unsharded, with outdated weights."""
    model = flat()
    optimizer = sgd(model)
    loss_of(model).backward()
    loss_of(model)
    optimizer.step()
    return [*shown(model), evaluate(model)]


@program(2)
def flat_clipping() -> Any:
    model = flat()
    optimizer = sgd(model)
    loss_of(model).backward()
    model.clip_grad_norm_(0.1)
    optimizer.step()
    return model


@program(2)
def flat_summoned() -> Any:
    model = flat()
    optimizer = train(model, 1)
    with FSDP.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data.mul_(2)
    train(model, 1, optimizer)
    return model


@program(2)
def flat_saved() -> Any:
    model = flat()
    optimizer = train(model, 1)
    # Fake ranks cannot join a barrier, so it is disabled.
    agreement.monitored_barrier = lambda *_, **__: []  # type: ignore[assignment]
    saved = [value.clone() for value in model.state_dict().values()]
    train(model, 1, optimizer)
    return [*shown(model), *saved]


@program(2)
def flat_checkpointed() -> Any:
    return trained(flat(chain(Checkpointed)))


class Shortened(nn.Sequential):
    """Runs only the first ``num_blocks`` blocks."""

    def forward(self, x: Tensor, num_blocks: int = 3) -> Tensor:
        for part in [*self[: 1 + num_blocks], self[-1]]:
            x = part(x)
        return x


@program(2)
def flat_with_blocks_left_out() -> Any:
    """The prefetched parameters of these blocks are not used."""
    model = flat(Shortened(*chain()), forward_prefetch=True)
    optimizer = train(model, 1)
    model(batch(), num_blocks=1).square().sum().backward()
    optimizer.step()
    return model


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
def flat_after_an_error() -> Any:
    model = flat()
    optimizer = train(model, 1)
    fail_in_forward(model)
    train(model, 1, optimizer)
    return model


@program(2)
def flat_after_an_error_in_backward() -> Any:
    model = flat(mixed_precision=MixedPrecision(param_dtype=BF16))
    optimizer = train(model, 1)
    fail_in_backward(model)
    optimizer.zero_grad()
    train(model, 1, optimizer)
    return model


class Failure(Exception):
    """The error that programs raise on purpose."""


def fail(*_: Any) -> Any:
    raise Failure


def fail_in_forward(model: nn.Module) -> None:
    hook = blocks(model)[-1].register_forward_pre_hook(fail)
    try:
        loss_of(model)
    except Failure:
        hook.remove()


def fail_in_backward(model: nn.Module) -> None:
    def lay(_: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    hook = blocks(model)[0].register_forward_hook(lay)
    loss = loss_of(model)
    hook.remove()
    with contextlib.suppress(Failure):
        loss.backward()


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


# --- FSDP1: machines ---


@program(2)
def flat_on_another_device_than_the_current() -> Any:
    torch.get_device_module(DEVICE).set_device(1)
    model = flat(mixed_precision=MixedPrecision(param_dtype=BF16))
    optimizer = train(model, 1)
    return [*shown(model), evaluate(model), *shown(trained_again(model, optimizer))]


def trained_again(model: Any, optimizer: Any) -> Any:
    train(model, 1, optimizer)
    return model


@program(2)
def originals_offload_on_another_device_after_an_error() -> Any:
    torch.get_device_module(DEVICE).set_device(1)
    return originals_offload_after_an_error_in_backward()


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


@program(4)
def hybrid_over_a_backend_with_threads() -> Any:
    use_threads()
    return trained(each(shape=(2, 2)))


def use_threads() -> None:
    """Makes synchronous collectives run in threads and return a handle, like those of gloo."""
    SimulatedNccl.has_threads = True


# --- FSDP2 ---


@program(2)
def each_full() -> Any:
    return trained(each(), 3)


@program(2)
def each_in_bf16() -> Any:
    return trained(each(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)))


@program(4)
def each_hybrid_in_float16() -> Any:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    return trained(each(shape=(2, 2), mp_policy=policy))


@program(2)
def each_kept_after_forward() -> Any:
    return trained(each(reshard_after_forward=False))


@program(4)
def each_resting() -> Any:
    return trained(each(reshard_after_forward=2), 3)


@program(4)
def each_hybrid() -> Any:
    return trained(each(shape=(2, 2)))


@program(4)
def each_hybrid_offload_in_bf16() -> Any:
    precision = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    return trained(each(shape=(2, 2), offload_policy=CPUOffloadPolicy(), mp_policy=precision), 3)


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


@program(1)
def each_alone_in_bf16() -> Any:
    return trained(each(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)))


@program(2)
def each_offload() -> Any:
    return trained(each(offload_policy=CPUOffloadPolicy()))


@program(2)
def each_offload_evaluated_and_changed() -> Any:
    model = each(offload_policy=CPUOffloadPolicy())
    evaluate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return trained(model)


@program(2)
def each_offload_in_bf16() -> Any:
    precision = MixedPrecisionPolicy(param_dtype=BF16)
    return trained(each(offload_policy=CPUOffloadPolicy(), mp_policy=precision))


@program(2)
def each_offload_not_pinned() -> Any:
    return trained(each(offload_policy=CPUOffloadPolicy(pin_memory=False)))


@program(2)
def each_offload_not_pinned_accumulating() -> Any:
    model = each(offload_policy=CPUOffloadPolicy(pin_memory=False))
    loss_of(model).backward()
    return trained(model)


@program(2)
def each_offload_accumulating() -> Any:
    model = each(offload_policy=CPUOffloadPolicy())
    optimizer = sgd(model)
    loss_of(model).backward()
    train(model, 2, optimizer)
    return model


@program(2)
def each_offload_with_the_optimizer_in_backward() -> Any:
    return step_in_backward(each(offload_policy=CPUOffloadPolicy()))


@program(2)
def each_with_the_optimizer_in_backward() -> Any:
    return step_in_backward(each())


@program(2)
def each_used_often_with_the_optimizer_in_backward() -> Any:
    """The optimizer uses the gradients of the last use while the block is all-gathered for the first use."""
    model = chain(CheckpointedReentrantly, num_blocks=1)
    for _ in range(3):
        model.insert(1, model[1])
    return step_in_backward(each(model))


class Recomputed(nn.Module):
    """Blocks that are used ``num_uses`` times, and recomputed with their hooks in backward after each use."""

    def __init__(self, num_blocks: int, num_uses: int = 1) -> None:
        super().__init__()
        self.inner, self.num_uses = nn.Sequential(*[MLP(5, 7) for _ in range(num_blocks)]), num_uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_uses):
            x = torch.as_tensor(checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False))
        return x


def recomputed(**options: Any) -> nn.Module:
    with torch.device(DEVICE):
        model = nn.Sequential(nn.Linear(5, 5), Recomputed(2, num_uses=2))
    prefetch = BackwardPrefetch.BACKWARD_POST
    return flat(model, use_orig_params=True, backward_prefetch=prefetch, **options)


@program(2)
def originals_used_twice_with_the_optimizer_in_backward() -> Any:
    """A block is all-gathered for its first use while the optimizer uses the gradients of its second use."""
    return step_in_backward(recomputed())


@program(2)
def originals_offload_used_twice_with_the_optimizer_in_backward() -> Any:
    return step_in_backward(recomputed(cpu_offload=CPUOffload(True)))


def prefetching_in_vain(**options: Any) -> nn.Module:
    """A recomputed block prefetches a block whose backward is already over."""
    with torch.device(DEVICE):
        model: nn.Module = nn.Sequential(nn.Linear(5, 5), Recomputed(1), MLP(5, 7))
    again, last = blocks(each(model, **options))
    again.set_modules_to_forward_prefetch([last])
    train(model, 1)
    return model


@program(2)
def each_prefetching_in_vain() -> Any:
    return prefetching_in_vain()


@program(2)
def each_offload_prefetching_in_vain() -> Any:
    model = prefetching_in_vain(offload_policy=CPUOffloadPolicy())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def step_in_backward(model: nn.Module) -> nn.Module:
    def step(parameter: Tensor) -> None:
        torch.optim.SGD([parameter], lr=0.1).step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        loss_of(model).backward()
    return model


@program(2)
def each_accumulating() -> Any:
    model = each()
    optimizer = sgd(model)
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    model.set_requires_gradient_sync(True)
    train(model, 2, optimizer)
    return model


@program(2)
def each_in_two_backwards() -> Any:
    model = each()
    optimizer = sgd(model)
    model.set_is_last_backward(False)
    loss_of(model).backward()
    model.set_is_last_backward(True)
    train(model, 1, optimizer)
    return model


@program(2)
def each_evaluating() -> Any:
    model = each()
    optimizer = train(model, 1)
    first = evaluate(model)
    train(model, 1, optimizer)
    return [*shown(model), first, evaluate(model)]


@program(2)
def each_evaluating_with_a_block_left_out() -> Any:
    """The evaluation prefetches a block that it skips. Then the optimizer writes to the shards of this block."""
    model = each(Shortened(*chain()))
    first, *others = blocks(model)
    first.set_modules_to_forward_prefetch(others)
    optimizer = sgd(model)
    loss_of(model).backward()
    with torch.no_grad():
        output = model(batch(), num_blocks=1)
    optimizer.step()
    return [*shown(model), output]


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
def each_assigned() -> Any:
    model = each()
    optimizer = train(model, 1)
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    train(model, 1)
    del optimizer
    return model


@program(2)
def each_after_an_error() -> Any:
    model = each()
    optimizer = train(model, 1)
    fail_in_forward(model)
    model.reset_iter_state()
    train(model, 1, optimizer)
    return model


@program(2)
def each_checkpointed() -> Any:
    return trained(each(chain(Checkpointed)))


@program(2)
def each_checkpointed_reentrantly() -> Any:
    return trained(each(chain(CheckpointedReentrantly)))


@program(2)
def each_with_single_parameters() -> Any:
    """Units of one parameter each: the all-gather output needs no copy-out."""
    with torch.device(DEVICE):
        model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    inputs = torch.randn(6, 4, device=DEVICE)
    mesh = init_device_mesh("sim", (2,))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model)
    for _ in range(3):
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program(2)
def each_cut_along_columns() -> Any:
    with torch.device(DEVICE):
        model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 3))
    mesh = init_device_mesh("sim", (2,))
    for part in model:
        fully_shard(part, mesh=mesh, shard_placement_fn=_columns(Shard(1)))
    fully_shard(model, mesh=mesh)
    return trained(model)


def _columns(placement: Any) -> Callable[[nn.Parameter], Any]:
    return lambda p: placement if p.ndim == 2 and p.shape[1] % 2 == 0 else None


@program(2)
def each_in_two_dtypes() -> Any:
    model = chain()
    for block in blocks(model):
        block.down.to(torch.float64)
    for block in blocks(model):
        block.down.register_forward_pre_hook(lambda _, inputs: tuple(x.double() for x in inputs))
        block.down.register_forward_hook(lambda *found: found[-1].float())
    return trained(each(model))


class ScaledInt8(Int8Shards):
    """Adds the rank's own scale after the all-gather; the scale is metadata, written before the all-gather."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        sent, shape = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return sent, (shape, sent[1].clone())

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        shape, scale = metadata
        made = super().fsdp_post_all_gather(gathered, shape, param_dtype, out=out)
        whole = out if made is None else made[0]
        assert whole is not None
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):
            whole.add_(scale)
        return made


def extended_chain(kind: Any = Int8Shards, bias: bool = True) -> nn.Module:
    """A chain whose layers can be split in two without padding, as `Int8Shards` requires."""
    with torch.device(DEVICE):
        return extended(nn.Sequential(nn.Linear(4, 6, bias), nn.Linear(6, 4, bias), nn.Linear(4, 2, bias)), kind)


def trained_extended(model: nn.Module, num_steps: int = 2, **options: Any) -> nn.Module:
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    for part in [*model.children(), model]:
        fully_shard(part, mesh=mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    inputs = torch.randn(6, 4, device=DEVICE)
    for _ in range(num_steps):
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def values_of(model: nn.Module) -> list[Tensor]:
    return [tensor.inner if isinstance(tensor, Int8Shards) else tensor for tensor in shown(model)]


@program(2)
def each_extended() -> Any:
    return values_of(trained_extended(extended_chain(), 3))


@program(2)
def each_extended_with_metadata() -> Any:
    # Without biases: their buffers would also keep this memory alive long enough.
    return values_of(trained_extended(extended_chain(ScaledInt8, bias=False), 3))


@program(1)
def each_extended_alone() -> Any:
    return values_of(trained_extended(extended_chain()))


@program(2)
def each_extended_offload() -> Any:
    return values_of(trained_extended(extended_chain(), offload_policy=CPUOffloadPolicy()))


@program(2)
def each_with_a_hook_on_its_own_stream() -> Any:
    model = each()
    stream = torch.get_device_module(DEVICE).Stream()
    for part in [model, *blocks(model)]:
        part.set_all_reduce_hook(lambda local_shard: local_shard.mul_(0.5), stream=stream)
    return trained(model)


@program(2)
def each_saved() -> Any:
    model = each()
    optimizer = train(model, 1)
    saved = [value.full_tensor() for value in model.state_dict().values()]
    train(model, 1, optimizer)
    return [*shown(model), *saved]


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


# --- both ---


@program(2)
def both_apis() -> Any:
    """Two models in alternation, each with communication streams of its own."""
    one, other = flat(), each()
    optimizers = [sgd(one), sgd(other)]
    for _ in range(2):
        train(one, 1, optimizers[0])
        train(other, 1, optimizers[1])
    return [*shown(one), *shown(other)]
