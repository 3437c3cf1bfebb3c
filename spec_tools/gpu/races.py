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
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import minifsdp
from minifsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from spec_tests.harness import device
from spec_tests.models.modules import MLP
from spec_tests.models.running import batch
from spec_tests.models.sharding import line_mesh
from spec_tools.gpu.tasks import Finding, device_module, on_ranks

LIMIT = 300.0
NUM_STEPS = 4
WIDTH, NUM_BLOCKS = 192, 4
LATE = ("communication streams", "compute stream", "all streams")
SHARE = 0.2  # fraction of the operators of a late stream that are delayed
LONGEST = 2.0  # longest delay in milliseconds
# `_sleep` counts cycles of the GPU's clock, which runs at 1 to 2 GHz. A delay need not be exact.
CYCLES_PER_MILLISECOND = 1_500_000

Trained = list[dict[str, Tensor]]  # for each step, the tensors of this rank after it, by name


def work(num_ranks: int, num_seeds: int, configuration: str) -> Finding:
    """Trains a configuration with each seed."""
    by_rank = on_ranks(num_ranks, hunt, LIMIT, configuration=configuration, num_seeds=num_seeds)
    delays = sum(delays for delays, _ in by_rank)
    row = {"configuration": configuration, "ranks": num_ranks, "seeds": num_seeds, "delays": delays}
    texts = [text for _, text in by_rank if text]
    if not texts:
        return {"table": [row]}
    return {"table": [{**row, "text": texts[0]}], "text": f"{configuration}, {num_ranks} ranks, {texts[0]}"}


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
            # As bytes, because nan is not equal to itself.
            bits, other_bits = (one.contiguous().view(-1).view(torch.uint8) for one in (value, mine[name]))
            num = int((bits != other_bits).sum())
            if num:
                return f"step {step}, {name}: {num} bytes differ"
    return ""


def train(configuration: str, mode: TorchDispatchMode) -> Trained:
    """Trains a small model under a mode; returns the loss and the local shards of all parameters after each step.

    If the name of a configuration ends with ``side stream``, the forward runs on another stream.
    """
    torch.manual_seed(0)
    model = CONFIGURATIONS[configuration](build_model().to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    is_aside = configuration.endswith("side stream") and device().type != "cpu"
    stream = device_module().Stream(device=device()) if is_aside else None
    trained: Trained = []
    with mode:
        for step in range(NUM_STEPS):
            with _on(stream):
                loss = model(batch(step, width=WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Copied on the device: reading them here would stop the CPU until all streams are done.
            shards = {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in model.named_parameters()}
            trained.append({"loss": loss.detach()} | shards)
    return [{name: value.cpu() for name, value in step.items()} for step in trained]


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


def _wrapper(model: nn.Module, **options: Any) -> nn.Module:
    mesh = _grid() if options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD else None
    policy = minifsdp.wrap.ModuleWrapPolicy({MLP})
    own = device() if device().index is not None else None
    return minifsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=own, device_mesh=mesh, **options)


def _function(model: nn.Module, is_hybrid: bool = False, **options: Any) -> nn.Module:
    mesh = _grid() if is_hybrid else line_mesh()
    for block in list(model.children())[:-1]:
        minifsdp.fully_shard(block, mesh=mesh, **options)
    return minifsdp.fully_shard(model, mesh=mesh, **options)


def _grid() -> DeviceMesh:
    """A mesh of two replicas, each sharded over half of the ranks."""
    names = ("replicate", "shard")
    return init_device_mesh(device().type, (2, dist.get_world_size() // 2), mesh_dim_names=names)


_BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CONFIGURATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": _wrapper,
    "wrapper, side stream": _wrapper,
    "wrapper, original parameters": partial(_wrapper, use_orig_params=True),
    "wrapper, SHARD_GRAD_OP": partial(_wrapper, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "wrapper, HYBRID_SHARD": partial(_wrapper, sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "wrapper, bfloat16": partial(_wrapper, mixed_precision=MixedPrecision(**_BF16)),
    "wrapper, forward prefetch": partial(_wrapper, forward_prefetch=True),
    "wrapper, no limiter": partial(_wrapper, limit_all_gathers=False),
    "wrapper, offload": partial(_wrapper, cpu_offload=CPUOffload(offload_params=True)),
    "function": _function,
    "function, side stream": _function,
    "function, hybrid": partial(_function, is_hybrid=True),
    "function, bfloat16": partial(_function, mp_policy=MixedPrecisionPolicy(**_BF16)),
    "function, offload": partial(_function, offload_policy=CPUOffloadPolicy()),
    "function, kept after forward": partial(_function, reshard_after_forward=False),
}
