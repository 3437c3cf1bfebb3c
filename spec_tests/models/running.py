"""Batches for the models, an iteration, and what was seen of it: in words, on the wire, and in memory.

Orders are written the way one would say them aloud: ``AG2`` is the gather of block 2, ``FREER`` is the root being
freed, and a bar stands between forward and backward::

    AGR AG0 F0 FREE0 AG1 F1 FREE1 | AG1 B1 AG0 FREE1 RS1 B0 FREE0 RS0 FREER RSR
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifsdp import trace
from spec_tests.harness import device
from spec_tests.models.modules import WIDTH, Stack


def batch(step: int = 0, rank: int | None = None, width: int = WIDTH) -> Tensor:
    """One rank's part of a step's batch: three samples."""
    rank = dist.get_rank() if rank is None else rank
    dice = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, width, generator=dice).to(device())


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def iterate(model: nn.Module, step: int = 0, optimizer: torch.optim.Optimizer | None = None, **arguments: Any) -> float:
    """Forward and backward of one batch and, with an optimizer, its step; the loss."""
    loss = loss_of(model(batch(step), **arguments))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def said(events: Iterable[trace.Event], *, waits: bool = False) -> str:
    """The events as words. The forward and the backward of the root are left out: they surround everything.

    Where the limiter holds the CPU back depends on the pace of the device, and is told if ``waits`` asks for it.
    """
    words = [(event.kind, event.unit.removeprefix("blocks.") or "R") for event in events]
    left_out = [("F", "R"), ("B", "R")]
    return " ".join(kind + unit for kind, unit in words if (kind, unit) not in left_out and (kind != "WAIT" or waits))


def recorded_iteration(model: nn.Module, step: int = 0, **arguments: Any) -> str:
    """Forward and backward, in words, with a bar in between and ``keepR`` where the root stays gathered."""
    with trace.record() as forward:
        loss = loss_of(model(batch(step), **arguments))
    with trace.record() as backward:
        loss.backward()
    keeps = " keepR" if "AGR" in said(forward.events) and "FREER" not in said(forward.events) else ""
    return f"{said(forward.events)}{keeps} | {said(backward.events)}"


def of_unit(recorder: trace.Recorder, unit: str, *kinds: str) -> list[str]:
    """The kinds of one unit's events, in order; only the given ones, or all but those of the limiter (see `said`)."""
    kept = [event.kind for event in recorder.events if event.unit == unit]
    return [kind for kind in kept if (kind in kinds if kinds else kind != "WAIT")]


class Wire(TorchDispatchMode):
    """Sees every collective that PyTorch executes, whoever asked for it: a second witness beside the tracer.

    Attributes:
        sent: of every collective the kind, and how many elements were gathered or reduced: the larger of what goes in
            and what comes out.
        values: those among them that carried parameters or gradients. The others carry integers: before the first
            gather of a unit, ranks make sure that all of them mean the same one (NEW-19).
        dtypes: by kind, those of the values.
    """

    # On the CPU torch's own wrapper gathers into a list of tensors.
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
        """The kinds of those that carried values."""
        return [kind for kind, _ in self.values]

    def calls(self, *kinds: str) -> list[str]:
        """The kinds of all, or of those that are of one of ``kinds``."""
        return [kind for kind, _ in self.sent if not kinds or kind in kinds]


class Watch:
    """Looks over the shoulder of each unit's layer while it computes. To be made before wrapping.

    It keeps the *storage* of the weight that the layer computes with, and can therefore say later whether that memory
    is still there. It sees the middle of a unit's forward, and of its backward: the moment when the gradient of the
    layer's output is known and that of its weight is not.

    Attributes:
        storages: by unit, the storage of what was computed with last.
        computed: by unit, the sizes of the weights seen in forward.
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
        """The units, the root's included, whose unsharded memory is there now."""
        return sorted(unit for unit, storage in self.storages.items() if storage.nbytes() > 0)

    def alive_blocks(self) -> list[str]:
        return [unit for unit in self.alive() if unit]
