"""Records torch's own FSDP with the event kinds of minifsdp, so that both can be played side by side.

torch keeps no list of events. Wrappers around these functions record them while one step runs:

=====  ==========================================================  ===================================================
kind   FSDP1                                                       FSDP2
=====  ==========================================================  ===================================================
``AG`` ``_all_gather_flat_param`` of the handle                    ``unshard`` of the group until ``wait_for_unshard``
``F``  forward hooks of the wrapped module                         after ``pre_forward`` until ``post_forward``
``B``  ``_pre_backward_hook`` until ``_post_backward_hook``        ``pre_backward`` until ``post_backward``
RS     ``reduce_scatter_single`` of ``torch.distributed``          the same
FREE   ``_free_unsharded_flat_param``                              ``reshard``, if it has freed something
=====  ==========================================================  ===================================================

On the CPU torch waits for each collective immediately, so nothing overlaps; the order is that of a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from docs_build.recording.watching import Watched, Watcher, as_parts, size
from minifsdp.engine.shards import padded_shard_numel

Hook = Callable[..., Any]


class TorchUnit(Watched):
    """A unit of torch: a handle of FSDP1, or a parameter group of FSDP2."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name, self.module = name, module
        self.state, self.is_in_backward = "S", False

    def held(self) -> tuple[str, str, int, int]:
        """Like `Watched.held`, without a phase, because torch's phases are different."""
        return self.state, "IDLE", sum(size(one) for one in self.reduced()), self.whole_bytes()

    def gather(self, watcher: Watcher, *, begins: bool) -> None:
        """Records the start or the end of an all-gather."""
        watcher.note("AG", self.name, begins, self.num_bytes, tuple(range(dist.get_world_size())))
        self.state = "G" if begins else "U"

    def freed(self, watcher: Watcher) -> None:
        """Records that the unsharded parameters were freed."""
        watcher.note("FREE", self.name, True, self.num_bytes)
        self.state = "S"

    def begin_backward(self, watcher: Watcher) -> None:
        """Called when the gradient of the unit's output has arrived, or the first of several gradients."""
        if not self.is_in_backward:
            watcher.note("B", self.name, True)
        self.is_in_backward = True

    def end_backward(self, watcher: Watcher) -> None:
        """Called when the unit's own gradients are complete. They are reduced next."""
        if self.is_in_backward:
            watcher.note("B", self.name, False)
        self.is_in_backward = False
        watcher.reducing = self


class _Group(TorchUnit):
    """A parameter group of FSDP2."""

    def __init__(self, name: str, module: nn.Module, group: Any) -> None:
        super().__init__(name, module)
        self.group = group
        num = dist.get_world_size()
        self.num_bytes = sum(4 * num * padded_shard_numel(p.shape, 0, num) for p in self.local_parameters)

    @property
    def local_parameters(self) -> list[Any]:
        return [one.sharded_param for one in self.group.fsdp_params]

    def leaves(self) -> list[torch.Tensor]:
        return [one._unsharded_param for one in self.group.fsdp_params if hasattr(one, "_unsharded_param")]

    def hooks(self, watcher: Watcher) -> Iterator[Any]:
        group = self.group
        yield _around(group, "unshard", before=lambda *_: self.state == "S" and self.gather(watcher, begins=True))
        yield _around(group, "wait_for_unshard", after=lambda: self.state == "G" and self.gather(watcher, begins=False))
        yield _around(group, "pre_forward", after=lambda *_: watcher.note("F", self.name, True))
        yield _around(group, "post_forward", before=lambda *_: watcher.note("F", self.name, False))
        yield _around(group, "pre_backward", before=lambda *_: self.begin_backward(watcher))
        yield _around(group, "post_backward", before=lambda *_: self.end_backward(watcher))
        yield _around(
            group, "reshard", after=lambda: self.state == "U" and not group.is_unsharded and self.freed(watcher)
        )


class _Handle(TorchUnit):
    """A handle of FSDP1."""

    def __init__(self, name: str, module: nn.Module, handle: Any) -> None:
        super().__init__(name, module)
        self.handle = handle
        self.num_bytes = 4 * handle.flat_param._padded_unsharded_size.numel()

    @property
    def local_parameters(self) -> list[Any]:
        return [self.handle.flat_param]

    def leaves(self) -> list[torch.Tensor]:
        flat = self.handle.flat_param
        return [flat] if flat.grad is not None and size(flat.grad) > size(flat._local_shard) else []

    def reduced(self) -> list[Any]:
        flat = self.handle.flat_param
        kept = getattr(flat, "_saved_grad_shard", None)
        return [kept] if kept is not None else [] if self.leaves() or flat.grad is None else [flat.grad]

    def shard_bytes(self) -> int:
        return size(self.handle.flat_param._local_shard)

    def pieces(self) -> list[tuple[float, float]]:
        flat = self.handle.flat_param
        whole, piece = flat._unpadded_unsharded_size.numel(), flat._local_shard.numel()
        start = dist.get_rank() * piece
        return as_parts([(start, min(start + piece, whole))], whole)

    def hooks(self, watcher: Watcher) -> Iterator[Any]:
        begin, end = (lambda *_, begins=begins: self.gather(watcher, begins=begins) for begins in (True, False))
        yield _around(self.handle, "_all_gather_flat_param", begin, end)
        yield _around(
            self.handle, "_free_unsharded_flat_param", after=lambda: self.state == "U" and self.freed(watcher)
        )
        yield self.module.register_forward_pre_hook(lambda *_: watcher.note("F", self.name, True))
        yield self.module.register_forward_hook(lambda *_: watcher.note("F", self.name, False))


def units_of(model: nn.Module) -> list[TorchUnit]:
    """The units of a model sharded by torch, the root's first."""
    if isinstance(model, FullyShardedDataParallel):
        wrappers = FullyShardedDataParallel.fsdp_modules(model)
        names = {module: name.replace("_fsdp_wrapped_module.", "") for name, module in model.named_modules()}
        return [_Handle(names[one], one.module, one._handle) for one in wrappers if one._handle is not None]
    states = [(name, module, _get_module_fsdp_state(module)) for name, module in model.named_modules()]
    return [_Group(name, module, state._fsdp_param_group) for name, module, state in states if state is not None]


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Records the events of torch in a ``with`` block."""
    units: list[Any] = watcher.units
    handles = {unit.handle: unit for unit in units if isinstance(unit, _Handle)}

    def note(begins: bool, *args: Any, **options: Any) -> None:
        whole = options["input"] if "input" in options else args[1]
        if begins:
            watcher.reducing.see([whole])
        watcher.note("RS", watcher.reducing.name, begins, size(whole), tuple(range(dist.get_world_size())))

    def pre_backward(state: Any, module: Any, handle: Any, *_: Any) -> None:
        if handle is not None:
            handles[handle].begin_backward(watcher)

    def post_backward(state: Any, handle: Any, *_: Any) -> None:
        handles[handle].end_backward(watcher)

    with ExitStack() as stack:
        for unit in units:
            for hook in unit.hooks(watcher):
                stack.enter_context(hook)
        stack.enter_context(_around(dist, "reduce_scatter_single", partial(note, True), partial(note, False)))
        stack.enter_context(_around(_runtime_utils, "_pre_backward_hook", pre_backward))
        stack.enter_context(_around(_runtime_utils, "_post_backward_hook", post_backward))
        yield


def _around(owner: Any, name: str, before: Hook | None = None, after: Hook | None = None) -> Any:
    """Calls a function before or after ``owner.name`` in a ``with`` block, with the same arguments."""
    real = getattr(owner, name)

    def both(*args: Any, **options: Any) -> Any:
        if before:
            before(*args, **options)
        result = real(*args, **options)
        if after:
            after(*args, **options)
        return result

    return mock.patch.object(owner, name, both)
