"""The shortest known programs with races in torch's FSDPs, version 2.13 or older.

`HAZARDS` are programs with races in torch 2.13.0. Each has the number of its ranks and the racing operators: the later
one, and the earlier one that it is not ordered after. The docstrings describe possible errors on a GPU. The other
programs disable a protection of torch to show its purpose.

Spec: SIM-09, SIM-10.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, fully_shard, share_comm_ctx
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from spec_tests.models.modules import MLP
from spec_tests.models.torch_names import param_groups
from spec_tools.torch_streams.torch_fsdp import (
    HALF_REDUCED,
    OFFLOADED,
    Program,
    batch,
    sharded,
    train,
    units,
    wrapped,
)

__all__ = ["HAZARDS", "by_chunks", "forgetting", "with_head", "without_keeping_reduce_scatter_inputs"]


# ---- torch 2.13 as it is ----


def all_reduced_by_a_hook(own_stream: bool = False, **options: Any) -> None:
    """The hook and the operators after it run on a separate stream, but use memory of the reduce-scatter stream.

    For a mesh with replicas, torch keeps the reduced gradient alive (``_all_reduce_state``), but not for
    ``set_all_reduce_hook`` without replicas. The gradient is freed after the launch of a cast, a copy to the CPU or an
    addition. The next reduce-scatter can write to its memory while they still run: wrong gradients.
    """
    stream = torch.get_device_module("sim").Stream() if own_stream else None
    model = sharded(**options)
    for unit in units(model):
        unit.set_all_reduce_hook(dist.all_reduce, stream=stream)
    train(model, None if options else lambda *_: None)


class Branches(nn.Module):
    """A model with two outputs; a loss of one output does not need the block of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = MLP(4, 8), MLP(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def two_losses() -> None:
    """An unused prefetch is freed at the end of a backward, and another backward starts an all-gather at once.

    ``right`` prefetches ``left``, which its loss does not need. At the end of this backward, the compute stream waits
    for the all-gather, and its output is freed. But the memory belongs to the copy-in stream, which does not wait. The
    copy-in of the second backward can get the same memory while the first all-gather still writes it: wrong weights in
    the second backward. (There is no race between steps: in a forward, the copy-in stream waits for everything.)
    """
    model = sharded(model=Branches())
    left, right = model(batch())
    right.sum().backward()
    left.sum().backward()


def written_after_a_forward(model: Any) -> None:
    """Offloaded parameters are copied from pinned memory, and the CPU does not wait for the end of the copies.

    After a backward, torch stops the CPU. After a forward without a backward it does not: an optimizer step or
    ``load_state_dict`` directly after an evaluation can overwrite memory that the device has not read yet. Reading the
    result of the evaluation first is a sufficient wait.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    with torch.no_grad():
        model(batch())
    optimizer.step()


def a_second_root_begins_later() -> None:
    """``share_comm_ctx``: the first forward of the second model creates the common streams again.

    This replaces the list that keeps the inputs of reduce-scatters alive. If the backward of the first model was not
    its last one, an input can still be in use. Its memory is reused by the next computation: wrong gradients.
    """
    first, second = sharded(), sharded()
    share_comm_ctx([first, second])
    first.set_is_last_backward(False)
    first(batch()).sum().backward()
    second(batch())


CAST, TO_CPU = "_to_copy", "_to_copy between devices"
FORWARD = ("fsdp::split_with_sizes_copy", "addmm", "tanh", "add")
SCATTER, GATHER, COPY_IN = "reduce_scatter_single", "all_gather_single", "fsdp::all_gather_copy_in"

HAZARDS: dict[str, tuple[int, Program, set[tuple[str, str]]]] = {
    "hook, bf16 reduction": (2, lambda: all_reduced_by_a_hook(**HALF_REDUCED), {(SCATTER, CAST)}),
    "hook, its own stream": (2, lambda: all_reduced_by_a_hook(True, **HALF_REDUCED), {(SCATTER, CAST)}),
    "hook, offload": (2, lambda: all_reduced_by_a_hook(**OFFLOADED), {(SCATTER, TO_CPU)}),
    "hook, accumulation": (2, all_reduced_by_a_hook, {(SCATTER, "add_")}),
    "two losses": (2, two_losses, {(COPY_IN, GATHER)}),
    "written after a forward": (2, lambda: written_after_a_forward(sharded(**OFFLOADED)), {("add_", TO_CPU)}),
    "written after a forward, FullyShardedDataParallel": (
        2,
        lambda: written_after_a_forward(wrapped(cpu_offload=CPUOffload(True))),
        {("add_", TO_CPU)},
    ),
    "a second root begins later": (2, a_second_root_begins_later, {(later, SCATTER) for later in FORWARD}),
}


# ---- torch 2.13 without one of its protections ----


@contextlib.contextmanager
def forgetting(attribute: str) -> Iterator[None]:
    """Parameter groups that discard every value of ``attribute``."""
    setattr(FSDPParamGroup, attribute, property(lambda self: None, lambda self, value: None))
    try:
        yield
    finally:
        delattr(FSDPParamGroup, attribute)


class Forgetful(list[Any]):
    def append(self, kept: Any) -> None:
        """Discards the value."""


def without_keeping_reduce_scatter_inputs(model: Any) -> None:
    """Call it after the first forward, which creates the list."""
    for unit in units(model):
        unit._get_fsdp_state()._comm_ctx.reduce_scatter_states = Forgetful()


class Head(nn.Module):
    """A model whose head is called separately, for one chunk of the result after the other, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = MLP(4, 8), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))  # type: ignore[no-any-return]


class One(tuple[nn.Module, ...]):
    """Several modules with a length of 1, so that torch does not recognize a part of a group."""

    def __len__(self) -> int:
        return 1


def with_head(replicas: int = 1, **options: Any) -> Any:
    """A `Head` whose norm and head form one group, so that a call of the head alone runs only a part of the group."""
    model = Head()
    group = [model.norm, model.head]
    if "offload_policy" not in options:
        model.to("sim")
    sizes = (replicas, 2) if replicas > 1 else (2,)
    mesh = init_device_mesh("sim", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for part in (model.body, group, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def by_chunks(model: Any, *, waits: bool = True, keeps: bool = True) -> None:
    """Two steps in which the head's backward runs in three chunks, and then the backward of the body.

    ``waits``: torch's compute stream waits for the whole reduction of a part of a group. ``keeps``: torch keeps the
    inputs of reduce-scatters alive until the compute stream has waited for them.
    """
    if not waits:
        group = param_groups(model.head._get_fsdp_state())[0]
        group.modules = One(group.modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        whole = model(batch())
        if not keeps:
            without_keeping_reduce_scatter_inputs(model)
        result = whole.detach().requires_grad_()
        for chunk in result.chunk(3):
            model.head(chunk).square().sum().backward()
        whole.backward(result.grad)
        optimizer.step()
        optimizer.zero_grad()
