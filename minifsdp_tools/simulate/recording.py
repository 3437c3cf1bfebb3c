"""Records one training step of the engine on the meta device, for any number of ranks, in one process.

`record` shards a model with the real ``FullyShardedDataParallel`` or ``fully_shard``, as rank 0 of a fake process
group. It trains for two steps and records the second one. The engine's code runs unchanged: its hooks, its schedule,
its limiter and its waits. Only four things are replaced, during the recording:

1. the streams and events of the device write on a tape (``device.py``);
2. operators have no values; they and their memory are written on the tape (``operators.py``);
3. collectives are written on the tape and not executed;
4. the checks that compare the collectives of all ranks are off, because they read values. In a real run they cost a few
   small collectives in the first step, and one in each further step.

Worked example::

    setup = Setup("llama3-8b", num_ranks=128, api="fsdp2", micro_batch=2, checkpointing="selective")
    recording = record(setup)
    recording.tape.items        # what the engine issued
    recording.peak_bytes        # of allocated memory

*In torch:* ``torch.distributed._tools.FSDPMemTracker`` records the memory of ``fully_shard``, without streams.

Spec: SIMULATE-01 to SIMULATE-05.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from minifsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from minifsdp.api import BackwardPrefetch, MixedPrecision, ShardingStrategy
from minifsdp.checks.rank_checks import RankChecks
from minifsdp.debugging import trace
from minifsdp.engine.messages import message
from minifsdp.engine.shards import local_tensor
from minifsdp.fsdp2.module import FSDPModule
from minifsdp_tools.simulate import models
from minifsdp_tools.simulate.device import META, device_module, registered
from minifsdp_tools.simulate.operators import OperatorMode, replaced_functions
from minifsdp_tools.simulate.setup import DTYPES, HYBRID, Setup
from minifsdp_tools.simulate.tape import Allocate, Free, Tape


@dataclass
class Recording:
    """A recorded step.

    Attributes:
        setup: the configuration.
        tape: what was issued.
        events: the engine's events (``minifsdp.trace``), in order of issue. Their times are the numbers of items that
            were on the tape. A replay gives them times in seconds.
        stored_bytes: memory at the beginning of the step: shards, states of the optimizer and buffers.
        tokens: tokens of this rank in the step.
    """

    setup: Setup
    tape: Tape
    events: list[trace.Event]
    stored_bytes: int
    tokens: int

    @property
    def peak_bytes(self) -> int:
        """The peak of allocated memory, in the order in which the CPU thread allocates and releases."""
        return max(
            (num_bytes for _, num_bytes in self.memory()), default=self.stored_bytes
        )

    def memory(self) -> Iterator[tuple[int, int]]:
        """The positions of allocations and releases on the tape, and the allocated bytes after each of them."""
        num_bytes = self.stored_bytes
        for position, item in enumerate(self.tape.items):
            if isinstance(item, Allocate | Free):
                num_bytes += (
                    item.num_bytes if isinstance(item, Allocate) else -item.num_bytes
                )
                yield position, num_bytes


def record(setup: Setup) -> Recording:
    """Records a step. It uses no accelerator, and memory for names and sizes only.

    Raises:
        RuntimeError: if this process has a default process group.
    """
    if dist.is_initialized():
        raise RuntimeError(message("simulate-group"))
    model = _model_of(setup)
    tape = Tape()
    mode = OperatorMode(tape)
    dist.init_process_group(
        "fake", rank=0, world_size=setup.num_ranks, store=FakeStore()
    )
    try:
        with (
            registered(device_module(tape, setup.ranks_per_machine)),
            replaced_functions(mode),
            # The check reads values.
            mock.patch.object(RankChecks, "backward_ends", return_value=None),
            mode,
        ):
            sharded, gradient_sync = _shard(model, setup)
            for buffer in sharded.buffers():
                mode.note(buffer)
            optimizer = (
                _FusedAdamW(sharded.parameters(), {})
                if setup.optimizer == "adamw"
                else torch.optim.SGD(sharded.parameters(), lr=0.1, foreach=False)
            )
            _train(model, sharded, optimizer, gradient_sync, setup, tape)
            tape.items.clear()
            stored = mode.num_bytes
            clock = SimpleNamespace(perf_counter=lambda: float(len(tape.items)))
            with mock.patch.object(trace, "time", clock), trace.record() as recorder:
                _train(model, sharded, optimizer, gradient_sync, setup, tape)
            # The following releases belong to no step.
            recorded = Tape(list(tape.items))
            del sharded, optimizer, gradient_sync, model.module
    finally:
        dist.destroy_process_group()
    return Recording(
        setup, recorded, recorder.events, stored, model.tokens * setup.accumulation
    )


def _model_of(setup: Setup) -> models.Model:
    if isinstance(setup.model, str) and ":" in setup.model:
        return resolve_name(setup.model)(setup)  # type: ignore[no-any-return]
    return models.transformer(
        setup.shape, setup.micro_batch, setup.sequence, setup.checkpointing, setup.unit
    )


# ---- sharding -------------------------------------------------------------------------------------------------------


def _shard(
    model: models.Model, setup: Setup
) -> tuple[nn.Module, Callable[[bool], Any]]:
    """The sharded model, and a function that returns a ``with`` block for a backward with or without reductions."""
    # Without shards, the wrapper takes a mesh of all ranks, and `fully_shard` one with a dimension of one rank.
    if setup.strategy in HYBRID or (
        setup.strategy == "NO_SHARD" and setup.api == "fsdp2"
    ):
        shape = {"replicate": setup.num_ranks // setup.shards, "shard": setup.shards}
    else:
        shape = {"shard": setup.num_ranks}
    mesh = init_device_mesh("meta", tuple(shape.values()), mesh_dim_names=tuple(shape))
    return (_shard_fsdp1 if setup.api == "fsdp1" else _shard_fsdp2)(model, setup, mesh)


def _shard_fsdp2(
    model: models.Model, setup: Setup, mesh: DeviceMesh
) -> tuple[nn.Module, Callable[[bool], Any]]:
    precision = MixedPrecisionPolicy(
        DTYPES[setup.param_dtype], DTYPES[setup.reduce_dtype], cast_forward_inputs=False
    )
    reshards = setup.reshard_after_forward or setup.strategy not in (
        "SHARD_GRAD_OP",
        "_HYBRID_SHARD_ZERO2",
    )
    for unit in model.units:
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=reshards, mp_policy=precision
        )
    sharded: FSDPModule = fully_shard(model.module, mesh=mesh, mp_policy=precision)  # type: ignore[assignment]

    def gradient_sync(enabled: bool) -> Any:
        sharded.set_requires_gradient_sync(enabled)
        sharded.set_is_last_backward(enabled)
        return nullcontext()

    return sharded, gradient_sync  # type: ignore[return-value]


def _shard_fsdp1(
    model: models.Model, setup: Setup, mesh: DeviceMesh
) -> tuple[nn.Module, Callable[[bool], Any]]:
    precision = MixedPrecision(
        DTYPES[setup.param_dtype],
        DTYPES[setup.reduce_dtype],
        cast_root_forward_inputs=False,
    )
    units = set(model.units)
    prefetch = (
        None
        if setup.backward_prefetch is None
        else BackwardPrefetch[setup.backward_prefetch]
    )
    sharded = FullyShardedDataParallel(
        model.module,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[setup.strategy],
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in units,
        backward_prefetch=prefetch,
        mixed_precision=precision,
        device_id=META,
        forward_prefetch=setup.forward_prefetch,
        limit_all_gathers=setup.limit_all_gathers,
        use_orig_params=True,
    )
    return sharded, lambda enabled: nullcontext() if enabled else sharded.no_sync()


# ---- training -------------------------------------------------------------------------------------------------------


class _FusedAdamW(torch.optim.Optimizer):
    """AdamW with its fused kernel, which torch's class refuses on the meta device."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates all parameters with one kernel."""
        trained = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        for parameter in trained:
            if not self.state[parameter]:
                self.state[parameter] = {
                    name: torch.zeros_like(parameter)
                    for name in ("exp_avg", "exp_avg_sq")
                }
        columns = zip(
            *((p, p.grad, *self.state[p].values()) for p in trained), strict=True
        )
        local = [[local_tensor(tensor) for tensor in tensors] for tensors in columns]
        torch._fused_adamw_(  # type: ignore[call-overload]
            *local,
            [],
            [],
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def _train(
    model: models.Model,
    sharded: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient_sync: Callable[[bool], Any],
    setup: Setup,
    tape: Tape,
) -> None:
    for number in range(setup.accumulation):
        with gradient_sync(not setup.no_sync or number == setup.accumulation - 1):
            tape.phase = "forward"
            loss = model.loss(sharded)
            tape.phase = "backward"
            loss.backward()
        del loss
    tape.phase = "optimizer"
    optimizer.step()
    optimizer.zero_grad()
