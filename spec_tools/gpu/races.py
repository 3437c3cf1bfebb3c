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
this machine are not deterministic, races cannot be detected, and the finding has this reason.

The delays come from a dispatch mode. It receives each operator and each collective on the stream on which it is issued,
in forward, in backward and in the optimizer.

Limit: a reported race is real, but races can stay undetected. The report contains the number of delays.

Spec: KIT-06.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import minifsdp
from minifsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from spec_tests.extensions.int8_shards import Int8Shards, extended
from spec_tests.harness import device, pool
from spec_tests.models.modules import MLP
from spec_tests.models.running import batch
from spec_tests.models.sharding import line_mesh
from spec_tools.gpu.job import Finding, device_module, on_ranks

LIMIT = 300.0
NUM_STEPS = 4
MICRO_BATCHES = 2  # in a step that accumulates
WIDTH, NUM_BLOCKS = 192, 4
LATE = ("communication streams", "compute stream", "all streams")
SHARE = 0.2  # fraction of the operators of a late stream that are delayed
LONGEST = 2.0  # longest delay in milliseconds
# `_sleep` counts cycles of the GPU's clock, which runs at 1 to 2 GHz. A delay need not be exact.
CYCLES_PER_MILLISECOND = 1_500_000

Trained = list[dict[str, Tensor]]  # for each step, the tensors of this rank after it, by name


def work(num_ranks: int, num_seeds: int) -> Iterator[Finding]:
    """Yields a finding for each configuration."""
    # For sums in a fixed order inside cuBLAS. The ranks inherit it, and it must be set before their first kernel.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for configuration in CONFIGURATIONS:
        finding = {"configuration": configuration, "ranks": num_ranks, "seeds": num_seeds}
        try:
            by_rank = on_ranks(num_ranks, hunt, LIMIT, configuration=configuration, num_seeds=num_seeds)
        except pool.Failure as failure:
            yield {**finding, "text": f"{configuration} on {num_ranks} ranks:\n{failure}"}
            continue
        finding["delays"] = sum(delays for delays, _ in by_rank)
        texts = [text for _, text in by_rank if text]
        yield {**finding, "text": f"{configuration}, {num_ranks} ranks, {texts[0]}"} if texts else finding


# ---- on a rank ------------------------------------------------------------------------------------------------------


def hunt(configuration: str, num_seeds: int) -> tuple[int, str]:
    """The number of delays, and the first difference: the seed, the streams that were late, the step and the name."""
    reference = train(configuration, Synchronized())
    found = first_difference(reference, train(configuration, Synchronized()))
    if found:
        found = f"no delays: the kernels are not deterministic, so races stay hidden: {found}"
    num_delays = 0
    # All ranks train with all seeds, because they wait for each other.
    for seed in range(num_seeds):
        delays = Delays(seed, dist.get_rank())
        difference = first_difference(reference, train(configuration, delays))
        num_delays += delays.num_delays
        if difference and not found:
            found = f"seed {seed}, rank {dist.get_rank()}, {delays.late} late: {difference}"
    return num_delays, found


def first_difference(reference: Trained, found: Trained) -> str:
    """The step and name of the first difference between two trainings; empty if they are equal bit by bit."""
    for step, (right, mine) in enumerate(zip(reference, found, strict=True)):
        for name, value in right.items():
            num = int((_bits(value) != _bits(mine[name])).sum())
            if num:
                return f"step {step}, {name}: {num} bytes differ"
    return ""


def _bits(value: Tensor) -> Tensor:
    # As bytes, because nan is not equal to itself.
    return value.contiguous().view(-1).view(torch.uint8)


def train(configuration: str, mode: TorchDispatchMode) -> Trained:
    """Trains a small model under a mode; returns the loss and the local shards of all parameters after each step.

    The last word of a configuration can change the loop: ``accumulation``, ``side stream``.
    """
    torch.manual_seed(0)
    model = CONFIGURATIONS[configuration](build_model().to(device()))
    # One operator for each parameter, because extensions of the tests do not support lists of tensors.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    num_micro = MICRO_BATCHES if configuration.endswith("accumulation") else 1
    is_aside = configuration.endswith("side stream") and device().type != "cpu"
    stream = device_module().Stream(device=device()) if is_aside else None
    trained: Trained = []
    with mode:
        for step in range(NUM_STEPS):
            losses = []
            for micro in range(num_micro):
                with contextlib.nullcontext() if micro == num_micro - 1 else _without_reduction(model):
                    with _on(stream):
                        loss = model(batch(MICRO_BATCHES * step + micro, width=WIDTH)).square().mean()
                    loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            # Copied on the device: reading them here would stop the CPU until all streams are done.
            shards = {name: _local(parameter).clone() for name, parameter in model.named_parameters()}
            trained.append({"loss": torch.stack(losses)} | shards)
    return [{name: value.cpu() for name, value in step.items()} for step in trained]


def _local(parameter: Tensor) -> Tensor:
    whole: Any = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Runs the block on another stream, between the work before and after it."""
    if stream is None:
        yield
        return
    outer = device_module().current_stream()
    stream.wait_stream(outer)
    with device_module().stream(stream):
        yield
    outer.wait_stream(stream)


@contextlib.contextmanager
def _without_reduction(model: nn.Module) -> Iterator[None]:
    if isinstance(model, minifsdp.FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, minifsdp.FSDPModule)
    is_hybrid = next(model.parameters()).device_mesh.ndim > 1  # type: ignore[attr-defined]
    # A hybrid mesh reduces over the shard group; the next backward all-reduces the sum over the replicas.
    reduce = model.set_requires_all_reduce if is_hybrid else model.set_requires_gradient_sync
    reduce(False)
    yield
    reduce(True)


def keep_busy(milliseconds: float) -> None:
    """Keeps the current stream busy, without stopping the CPU. Does nothing without a GPU."""
    if device().type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))


class Delays(TorchDispatchMode):
    """Delays streams.

    Args:
        seed: determines which streams are late, and before which of their operators.
        rank: the rank; each rank draws delays of its own.
    """

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.late = LATE[seed % len(LATE)]
        self.random = random.Random(1000 * seed + rank)
        self.compute_stream = device_module().current_stream()
        self.num_delays = 0

    def __enter__(self) -> Any:
        stack = self._patches = contextlib.ExitStack()
        kind = type(self.compute_stream)
        for name in ("record_event", "wait_event") if device().type != "cpu" else ():
            stack.enter_context(mock.patch.object(kind, name, self._delayed(getattr(kind, name))))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _delayed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Delays a stream before it records an event, so that the event is late, or before it waits for one."""

        def delayed(stream: Any, *arguments: Any) -> Any:
            with device_module().stream(stream):
                self._delay(stream)
            return call(stream, *arguments)

        return delayed

    def _delay(self, stream: Any) -> None:
        is_late = self.late in (LATE[1] if stream == self.compute_stream else LATE[0], LATE[2])
        if is_late and self.random.random() < SHARE:
            self.num_delays += 1
            keep_busy(LONGEST * self.random.random())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._delay(device_module().current_stream())
        return func(*args, **(kwargs or {}))


class Synchronized(TorchDispatchMode):
    """Synchronizes the whole device after each operator, so that nothing runs in parallel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        device_module().synchronize()
        return result


# ---- models ---------------------------------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """A chain of blocks, and a last layer that belongs to the root."""
    return nn.Sequential(*(MLP(WIDTH, 2 * WIDTH) for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 8))


def _wrapper(model: nn.Module, **options: Any) -> minifsdp.FullyShardedDataParallel:
    mesh = _grid() if "HYBRID" in str(options.get("sharding_strategy")) else None
    policy = minifsdp.wrap.ModuleWrapPolicy({MLP})
    own = device() if device().index is not None else None
    return minifsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=own, device_mesh=mesh, **options)


def _function(model: nn.Module, hybrid: bool = False, **options: Any) -> nn.Module:
    mesh = _grid() if hybrid else line_mesh()
    for block in model.children():
        if isinstance(block, MLP):
            minifsdp.fully_shard(block, mesh=mesh, **options)
    return minifsdp.fully_shard(model, mesh=mesh, **options)


def _grid() -> DeviceMesh:
    """A mesh of two replicas, each sharded over half of the ranks."""
    names = ("replicate", "shard")
    return init_device_mesh(device().type, (2, dist.get_world_size() // 2), mesh_dim_names=names)


class Shift(MLP):
    """Adds one parameter to the input. It is a unit, because the policy wraps each `MLP`."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(3, WIDTH))  # as large as a batch

    def forward(self, x: Tensor) -> Tensor:
        """The same gradient for both operands."""
        return (x + self.weight).tanh()


def _single_parameters(model: nn.Module) -> nn.Module:
    """Units of one parameter, whose gradient autograd may also use for another input."""
    return _wrapper(nn.Sequential(*(Shift() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 8)).to(device()))


def _with_hook(model: nn.Module) -> nn.Module:
    """A communication hook that divides in place."""
    wrapped = _wrapper(model)
    wrapped.register_comm_hook(dist.get_world_size(), _divide_and_reduce)
    return wrapped


def _divide_and_reduce(num_ranks: int, whole: Tensor, local_shard: Tensor) -> None:
    whole.div_(num_ranks)
    dist.reduce_scatter_tensor(local_shard, whole)


def _steps_in_backward(model: nn.Module) -> nn.Module:
    """Each parameter is updated as soon as its gradient is reduced."""
    sharded = _function(model)
    for parameter in sharded.parameters():
        parameter.register_post_accumulate_grad_hook(_descend)
    return sharded


@torch.no_grad()
def _descend(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def _extended(model: nn.Module) -> nn.Module:
    """Matrices are all-gathered as int8 with one scale for each rank, by an extension."""
    return _function(extended(model, Int8Shards))


_BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_FP16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
_OF_WRAPPER: dict[str, dict[str, Any]] = {
    "wrapper": {},
    "wrapper, original parameters": {"use_orig_params": True},
    "wrapper, SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "wrapper, HYBRID_SHARD": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "wrapper, NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "wrapper, bfloat16": {"mixed_precision": _BF16},
    "wrapper, bfloat16, original parameters": {"mixed_precision": _BF16, "use_orig_params": True},
    "wrapper, float16": {"mixed_precision": _FP16},
    "wrapper, side stream": {},
    "wrapper, forward prefetch": {"forward_prefetch": True},
    "wrapper, no limiter": {"limit_all_gathers": False},
    "wrapper, offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "wrapper, accumulation": {},
}
_BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_OF_FUNCTION: dict[str, dict[str, Any]] = {
    "function": {},
    "function, bfloat16": {"mp_policy": _BF16_POLICY},
    "function, offload": {"offload_policy": CPUOffloadPolicy()},
    "function, accumulation": {},
    "function, kept after forward": {"reshard_after_forward": False},
    "function, side stream": {},
}
CONFIGURATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{name: partial(_wrapper, **options) for name, options in _OF_WRAPPER.items()},
    "wrapper, single parameters": _single_parameters,
    "wrapper, communication hook": _with_hook,
    **{name: partial(_function, **options) for name, options in _OF_FUNCTION.items()},
    **{f"hybrid {name}": partial(_function, hybrid=True, **options) for name, options in _OF_FUNCTION.items()},
    "function, optimizer in backward": _steps_in_backward,
    "function, custom all-gather": _extended,
}
