"""Batches for the models, one iteration, and its events, collectives and memory.

Events are written as short words: ``AG2`` is the all-gather of block 2, ``FREER`` frees the root's unsharded memory,
and a bar separates forward from backward::

    AGR AG0 F0 FREE0 AG1 F1 FREE1 | AG1 B1 AG0 FREE1 RS1 B0 FREE0 RS0 FREER RSR
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_tests.harness import device
from spec_tests.models.modules import WIDTH, Stack
from spec_tests.subject import trace


@contextlib.contextmanager
def detailed_debugging() -> Iterator[None]:
    """Sets torch's debug level to ``DETAIL`` inside the block."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def batch(step: int = 0, rank: int | None = None, width: int = WIDTH) -> Tensor:
    """One rank's part of a step's batch: three samples."""
    rank = dist.get_rank() if rank is None else rank
    dice = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, width, generator=dice).to(device())


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def iterate(model: nn.Module, step: int = 0, optimizer: torch.optim.Optimizer | None = None, **arguments: Any) -> float:
    """Runs forward and backward of one batch and, with an optimizer, its step. Returns the loss."""
    loss = loss_of(model(batch(step), **arguments))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def said(events: Iterable[trace.Event], *, waits: bool = False) -> str:
    """The events as words, without the forward and the backward of the root, which surround everything.

    Where the limiter makes the CPU wait depends on the speed of the device. Set ``waits`` to include these events.
    """
    words = [(event.kind, event.unit.removeprefix("blocks.") or "R") for event in events]
    left_out = [("F", "R"), ("B", "R")]
    return " ".join(kind + unit for kind, unit in words if (kind, unit) not in left_out and (kind != "WAIT" or waits))


def recorded_iteration(model: nn.Module, step: int = 0, **arguments: Any) -> str:
    """Forward and backward as words, with a bar in between, and ``keepR`` if the root stays unsharded."""
    with trace.record() as forward:
        loss = loss_of(model(batch(step), **arguments))
    with trace.record() as backward:
        loss.backward()
    keeps = " keepR" if "AGR" in said(forward.events) and "FREER" not in said(forward.events) else ""
    return f"{said(forward.events)}{keeps} | {said(backward.events)}"


def backward_words(model: nn.Module, step: int = 0, **arguments: Any) -> list[str]:
    """The events of a backward, as words."""
    return recorded_iteration(model, step, **arguments).partition("|")[2].split()


def of_unit(recorder: trace.Recorder, unit: str, *kinds: str) -> list[str]:
    """The kinds of one unit's events, in order: only ``kinds``, or all except those of the limiter (see `said`)."""
    kept = [event.kind for event in recorder.events if event.unit == unit]
    return [kind for kind in kept if (kind in kinds if kinds else kind != "WAIT")]


class Wire(TorchDispatchMode):
    """Records every collective that PyTorch executes, from any caller and independently of the tracer.

    Attributes:
        sent: the kind of every collective and the number of elements that it all-gathers or reduces: the larger of its
            input and its output.
        values: the ones in ``sent`` that carry parameters or gradients. The others carry integers: before the first
            all-gather of a unit, the ranks check that they are about to all-gather the same unit (NEW-19).
        dtypes: the dtypes of the values, by kind.
    """

    # On the CPU, torch's own wrapper all-gathers into a list of tensors.
    KINDS = {"_allgather_base_": "AG", "allgather_": "AG", "_reduce_scatter_base_": "RS", "allreduce_": "AR"}

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.values: list[tuple[str, int]] = []
        self.dtypes: defaultdict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        tensors = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
        seen = self.KINDS.get(name, name), max(sum(tensor.numel() for tensor in several) for several in tensors)
        self.sent.append(seen)
        dtypes = {tensor.dtype for several in tensors for tensor in several if tensor.is_floating_point()}
        if dtypes:
            self.values.append(seen)
            self.dtypes[seen[0]] |= dtypes

    def kinds(self) -> list[str]:
        """The kinds of the collectives that carried values."""
        return [kind for kind, _ in self.values]

    def calls(self, *kinds: str) -> list[str]:
        """The kinds of all collectives, or only the ones in ``kinds``."""
        return [kind for kind, _ in self.sent if not kinds or kind in kinds]


class Watch:
    """Observes each unit's layer while it computes. Create it before wrapping.

    It keeps the *storage* of the weight that the layer computes with, so it can check later whether this memory is
    still allocated. It observes the middle of a unit's forward and of its backward. In backward, this is the moment
    when the gradient of the layer's output is known, and the gradient of its weight is not.

    Attributes:
        storages: by unit, the storage that the unit last computed with.
        in_forward: called with the unit's name in the middle of its forward.
        in_backward: the same in the middle of its backward.
    """

    def __init__(self, model: Stack) -> None:
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.in_forward: Callable[[str], None] = lambda unit: None
        self.in_backward: Callable[[str], None] = lambda unit: None
        self._lay(model.enter, "")
        for index, block in enumerate(model.blocks):
            self._lay(next(block.children()), f"blocks.{index}")

    def _lay(self, layer: nn.Module, unit: str) -> None:
        def seen(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.storages[unit] = module.weight.untyped_storage()
            self.in_forward(unit)
            if output.requires_grad:
                output.register_hook(lambda _: self.in_backward(unit))

        layer.register_forward_hook(seen)

    def alive(self) -> list[str]:
        """The units, including the root, whose unsharded memory is allocated now."""
        return sorted(unit for unit, storage in self.storages.items() if storage.nbytes() > 0)

    def alive_blocks(self) -> list[str]:
        return [unit for unit in self.alive() if unit]
