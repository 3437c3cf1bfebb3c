"""Searches for races with real delays: do results stay equal bit by bit if streams are late?

The package runs collectives on streams of their own, next to the compute stream, and orders the streams with events. A
missing wait is seldom noticed, because the other stream has usually finished by then. So this module delays streams:
before randomly selected operators, events and waits, it keeps the stream busy for a while::

    communication stream   [ delay ][ all-gather ]
    compute stream              wait ^            [ forward ]      with the wait: late, but correct
    compute stream         [ forward ]                             without it: computes with the old values

The seed selects whether the communication streams are late, the compute stream, or both. Each rank draws its own
delays. Values are correct if they equal, bit by bit, those of a *reference*. The reference synchronizes the device
after every operator, so that nothing runs in parallel. It is trained twice. If the two results differ, the kernels of
this machine are not deterministic, races cannot be detected, and the chunk fails with this reason.

The delays come from a dispatch mode. It receives each operator and each collective on the stream on which it is issued,
in forward, in backward and in the optimizer.

Limit: a reported race is real, but races can stay undetected. The report contains the number of delays.

Spec: KIT-06.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import minifsdp
from minifsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from spec_tests.fsdp2.int8_shards import Int8Shards, extended
from spec_tests.harness import device, pool
from spec_tests.models.modules import MLP
from spec_tools.gpu.on_ranks import on_ranks
from spec_tools.gpu.platforms import Platform, find
from spec_tools.gpu.smoke import own_device

__all__ = ["CONFIGURATIONS", "LATE", "Delays", "Trained", "first_difference", "train", "work"]

NUM_STEPS = 4
MICRO_BATCHES = 2  # in a step that accumulates
WIDTH, NUM_BLOCKS, NUM_ROWS = 192, 4, 16
LATE = ("communication streams", "compute stream", "all streams")
AGAIN = -1  # the seed of the finding about the equality of the two references
SHARE = 0.2  # fraction of the operators of a late stream that are delayed
LONGEST = 2.0  # longest delay in milliseconds

Trained = list[dict[str, Tensor]]  # for each step, the tensors of this rank after it, by name
Build = Callable[[nn.Module], nn.Module]


def work(
    platform: Platform, configuration: str, num_ranks: int, num_seeds: int, hang_limit: float
) -> Iterator[dict[str, Any]]:
    """Yields a finding for the reference, and then one for each seed."""
    # For sums in a fixed order inside cuBLAS. The ranks inherit it, and it must be set before their first kernel.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    about = {"configuration": configuration, "ranks": num_ranks}
    arguments = {"name": platform.name, "configuration": configuration, "num_seeds": num_seeds}
    try:
        by_rank = on_ranks(platform, num_ranks, hunt, hang_limit, **arguments)
    except pool.Failure as failure:
        yield {**about, "outcome": "failed", "text": f"{configuration} on {num_ranks} ranks:\n{failure}"}
        return
    for seed, findings in enumerate(zip(*by_rank, strict=True), start=AGAIN):
        joined = {**about, "seed": seed, **_joined(findings)}
        if joined["outcome"] == "failed":
            joined["text"] = f"{configuration}, {num_ranks} ranks, seed {seed}, {joined['text']}"
        yield joined
        if joined["outcome"] == "failed" and seed == AGAIN:
            return


def _joined(findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The findings of all ranks for one seed as one finding, with the text of the first rank that found a
    difference."""
    stated = next((finding for finding in findings if finding["outcome"] == "failed"), findings[0])
    return {**stated, "delays": sum(finding["delays"] for finding in findings)}


# ---- on a rank ------------------------------------------------------------------------------------------------------


def hunt(name: str, configuration: str, num_seeds: int) -> list[dict[str, Any]]:
    """A finding for the second training of the reference, and one for each seed."""
    platform = find(name)
    reference = train(configuration, Synchronised(platform))
    again = train(configuration, Synchronised(platform))
    findings = [_finding("no delays: the kernels are not deterministic, so races stay hidden", 0, reference, again)]
    for seed in range(num_seeds):
        delays = Delays(platform, seed, dist.get_rank())
        found = train(configuration, delays)
        findings.append(_finding(f"{delays.late} late", delays.num_delays, reference, found))
    return findings


def _finding(circumstances: str, num_delays: int, reference: Trained, found: Trained) -> dict[str, Any]:
    """Whether two trainings are equal on this rank."""
    difference = first_difference(reference, found)
    if not difference:
        return {"outcome": "passed", "delays": num_delays}
    text = f"rank {dist.get_rank()}, {circumstances}: {difference}"
    return {"outcome": "failed", "delays": num_delays, "text": text}


def first_difference(reference: Trained, found: Trained) -> str:
    """The step and name of the first difference between two trainings; empty if they are equal bit by bit."""
    for step, (right, mine) in enumerate(zip(reference, found, strict=True)):
        for name, value in right.items():
            if not torch.equal(_bits(value), _bits(mine[name])):
                num = int((_bits(value) != _bits(mine[name])).sum())
                return f"step {step}, {name}: {num} of {_bits(value).numel()} bytes differ"
    return ""


def _bits(value: Tensor) -> Tensor:
    # As bytes, because nan is not equal to itself.
    return value.contiguous().view(-1).view(torch.uint8)


def train(configuration: str, mode: TorchDispatchMode) -> Trained:
    """Trains a small model under a mode; returns the loss and the local shards of all parameters after each step."""
    torch.manual_seed(0)
    model = CONFIGURATIONS[configuration](build_model().to(device()))
    # Extensions of the tests do not support operators on lists of tensors.
    is_extended = configuration.endswith("custom all-gather")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False if is_extended else None)
    accumulates = configuration.endswith("accumulation")
    forward_stream = new_stream(device()) if configuration.endswith("side stream") else None
    trained: Trained = []
    with mode:
        for step in range(NUM_STEPS):
            losses = []
            for micro in range(MICRO_BATCHES if accumulates else 1):
                with _no_sync(model) if accumulates and micro == 0 else contextlib.nullcontext():
                    with _on(forward_stream):
                        loss = model(_batch(step, micro)).square().mean()
                    loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            # Copied on the device: reading them here would stop the CPU until all streams are done.
            shards = {name: _local(parameter).clone() for name, parameter in model.named_parameters()}
            trained.append({"loss": torch.stack(losses)} | shards)
    return [{name: value.cpu() for name, value in step.items()} for step in trained]


def _local(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.detach()
    return local.to_local() if hasattr(local, "to_local") else local


def _batch(step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + dist.get_rank())
    return torch.randn(NUM_ROWS, WIDTH, generator=generator).to(device())


def new_stream(here: torch.device) -> Any:
    """A new stream of an accelerator; ``None`` on the CPU."""
    return None if here.type == "cpu" else torch.get_device_module(here).Stream(device=here)


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Runs the block on another stream, between the work before and after it."""
    if stream is None:
        yield
        return
    module = torch.get_device_module(device())
    outer = module.current_stream()
    stream.wait_stream(outer)
    with module.stream(stream):
        yield
    outer.wait_stream(stream)


@contextlib.contextmanager
def _no_sync(model: nn.Module) -> Iterator[None]:
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    if mesh is not None and mesh.ndim > 1:
        assert isinstance(model, minifsdp.FSDPModule)
        # Reduces over the shard group only; the next backward all-reduces the sum over the replicas.
        model.set_requires_all_reduce(False)
        yield
        model.set_requires_all_reduce(True)
    elif isinstance(model, minifsdp.FullyShardedDataParallel):
        with model.no_sync():
            yield
    else:
        assert isinstance(model, minifsdp.FSDPModule)
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


class Delays(TorchDispatchMode):
    """Delays streams.

    Args:
        platform: the platform that delays a stream.
        seed: determines which streams are late, and before which of their operators.
        rank: the rank; each rank draws delays of its own.
    """

    def __init__(self, platform: Platform, seed: int, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.platform = platform
        self.late = LATE[seed % len(LATE)]
        self.random = random.Random(1000 * seed + rank)
        self.compute_stream = platform.current_stream()
        self.num_delays = 0

    def __enter__(self) -> Any:
        stack = self._patches = contextlib.ExitStack()
        kind = type(self.compute_stream)
        for name in ("record_event", "wait_event") if self.platform.device_type != "cpu" else ():
            stack.enter_context(mock.patch.object(kind, name, self._delayed(getattr(kind, name))))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _delayed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Delays a stream before it records an event, so that the event is late, or before it waits for one."""

        def delayed(stream: Any, *arguments: Any) -> Any:
            with torch.get_device_module(stream.device).stream(stream):
                self._delay(stream)
            return call(stream, *arguments)

        return delayed

    def _delay(self, stream: Any) -> None:
        is_late = self.late in (LATE[1] if stream == self.compute_stream else LATE[0], LATE[2])
        if is_late and self.random.random() < SHARE:
            self.num_delays += 1
            self.platform.sleep(LONGEST * self.random.random())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._delay(self.platform.current_stream())
        return func(*args, **(kwargs or {}))


class Synchronised(TorchDispatchMode):
    """Synchronizes the whole device after each operator, so that nothing runs in parallel."""

    def __init__(self, platform: Platform) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.platform = platform

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.platform.synchronize()
        return result


# ---- models ---------------------------------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """A chain of blocks, and a last layer that belongs to the root."""
    return nn.Sequential(*(MLP(WIDTH, 2 * WIDTH) for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 8))


def _wrapper(**options: Any) -> Build:
    """Builds with ``FullyShardedDataParallel``."""
    policy = minifsdp.wrap.ModuleWrapPolicy({MLP})

    def build(model: nn.Module) -> nn.Module:
        mesh = _grid() if "HYBRID" in str(options.get("sharding_strategy")) else None
        return minifsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=own_device(), device_mesh=mesh, **options
        )

    return build


def _function(hybrid: bool = False, **options: Any) -> Build:
    """Builds with ``fully_shard``."""

    def build(model: nn.Module) -> nn.Module:
        mesh = _grid() if hybrid else init_device_mesh(device().type, (dist.get_world_size(),))
        for block in model.children():
            if isinstance(block, MLP):
                minifsdp.fully_shard(block, mesh=mesh, **options)
        return minifsdp.fully_shard(model, mesh=mesh, **options)

    return build


def _single_parameters(model: nn.Module) -> nn.Module:
    """Units of one parameter, whose gradient autograd may also use for another input."""
    return _wrapper()(nn.Sequential(*(Shift() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 8)).to(device()))


class Shift(MLP):
    """Adds one parameter to the input. It is a unit, because the policy wraps each `MLP`."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(NUM_ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The same gradient for both operands."""
        return (x + self.weight).tanh()


def _with_hook(model: nn.Module) -> nn.Module:
    """A communication hook that divides in place."""
    wrapped = _wrapper()(model)
    assert isinstance(wrapped, minifsdp.FullyShardedDataParallel)
    wrapped.register_comm_hook(dist.get_world_size(), _divide_and_reduce)
    return wrapped


def _divide_and_reduce(num_ranks: int, whole: Tensor, local_shard: Tensor) -> None:
    whole.div_(num_ranks)
    dist.reduce_scatter_tensor(local_shard, whole)


def _steps_in_backward(model: nn.Module) -> nn.Module:
    """Each parameter is updated as soon as its gradient is reduced."""
    sharded = _function()(model)
    for parameter in sharded.parameters():
        parameter.register_post_accumulate_grad_hook(_descend)
    return sharded


@torch.no_grad()
def _descend(parameter: Tensor) -> None:
    parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def _extended(model: nn.Module) -> nn.Module:
    """Matrices are all-gathered as int8 with one scale for each rank, by an extension."""
    return _function()(extended(model, Int8Shards))


def _grid() -> Any:
    """A mesh of two replicas, each sharded over half of the ranks."""
    names = ("replicate", "shard")
    return init_device_mesh(device().type, (2, dist.get_world_size() // 2), mesh_dim_names=names)


_BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_FP16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
_BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CONFIGURATIONS: dict[str, Build] = {
    "wrapper": _wrapper(),
    "wrapper, original parameters": _wrapper(use_orig_params=True),
    "wrapper, SHARD_GRAD_OP": _wrapper(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "wrapper, HYBRID_SHARD": _wrapper(sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "wrapper, NO_SHARD": _wrapper(sharding_strategy=ShardingStrategy.NO_SHARD),
    "wrapper, bfloat16": _wrapper(mixed_precision=_BF16),
    "wrapper, bfloat16, original parameters": _wrapper(mixed_precision=_BF16, use_orig_params=True),
    "wrapper, float16": _wrapper(mixed_precision=_FP16),
    "wrapper, single parameters": _single_parameters,
    "wrapper, communication hook": _with_hook,
    "wrapper, side stream": _wrapper(),
    "wrapper, forward prefetch": _wrapper(forward_prefetch=True),
    "wrapper, no limiter": _wrapper(limit_all_gathers=False),
    "wrapper, offload": _wrapper(cpu_offload=CPUOffload(offload_params=True)),
    "wrapper, accumulation": _wrapper(),
    "function": _function(),
    "function, kept after forward": _function(reshard_after_forward=False),
    "function, hybrid": _function(hybrid=True),
    "function, bfloat16": _function(mp_policy=_BF16_POLICY),
    "function, hybrid, bfloat16": _function(hybrid=True, mp_policy=_BF16_POLICY),
    "function, offload": _function(offload_policy=CPUOffloadPolicy()),
    "function, hybrid, offload": _function(hybrid=True, offload_policy=CPUOffloadPolicy()),
    "function, optimizer in backward": _steps_in_backward,
    "function, side stream": _function(),
    "function, custom all-gather": _extended,
    "function, accumulation": _function(),
    "function, hybrid, accumulation": _function(hybrid=True),
}
