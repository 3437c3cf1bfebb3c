"""A parameter that decides for itself what is sent: the extension for tensor subclasses.

A weight in 8 bits need not be sent in 32. If the local tensor of a parameter is of a class with two methods, the gather
asks it: the first says what each rank sends, the second makes of what arrived the tensor that is computed with::

    shard (float32, class Int8)  --- fsdp_pre_all_gather --->   steps (int8), scale (float32)
                                                                     | gather each
    leaf (bfloat16)              <-- fsdp_post_all_gather ---   steps and scales of all ranks

Such a parameter has a row for itself, with the verbs of ``Row``:

1. the shard is padded before it is asked, so that all ranks send equally much whatever its class does;
2. the first time, the second method makes a tensor; it becomes the leaf, for good. From then on it is asked to fill it;
3. the memory of what arrived, and of the inner tensors that the class named, lasts from gather to free. What else the
   first method gave along is the class's own; it is kept until the compute stream is done with it.
4. a tensor of any class may be given the two methods after sharding, ``p.to_local().fsdp_pre_all_gather = ...``. They
   know that very tensor, so it is neither padded nor moved nor copied before it is asked; what it sends is.

*In torch:* branches in ``FSDPParam`` and ``foreach_all_gather``.

Spec: FS2-EXT-01 to FS2-EXT-06, STREAM-04.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from minifsdp.engine import collectives, lifetime
from minifsdp.engine.cut import Cut
from minifsdp.engine.lanes import NOTHING, Lane, Promise, compute_event
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.row import Options

BEFORE, AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


class ExtendedRow:
    """One parameter whose class has the two methods; see `Row` for the verbs and attributes.

    Args:
        cut: how it is cut.
        piece: this rank's.
        group: the ranks that have the others; ``None`` if there are none.
        options: where to compute, and in which dtype.
        mesh: the ranks that gather, one axis; told to the first method.
        module: whose parameter it is; told, too.
    """

    is_borrowed = False

    def __init__(
        self, cut: Cut, piece: torch.Tensor, group: Group | None, options: Options, mesh: Any, module: nn.Module
    ) -> None:
        self._cut, self.group, self._mesh, self._module, self._policy = cut, group, mesh, module, options.policy
        self.device, self.dtype = options.device, options.compute_dtype(piece.dtype)
        self.num_bytes = cut.padded_numel * self.dtype.itemsize
        self._home = options.home_of(piece)
        self._pad(piece)
        # Of a shape that fits, and without memory, until the first gather has made the real one.
        self.leaves = [nn.Parameter(torch.empty(cut.shape, dtype=self.dtype, device="meta"), requires_grad=False)]
        self._freed_at: Any = None
        self._outputs: list[torch.Tensor] = []
        self._inner: list[tuple[torch.Tensor, int]] = []

    def take(self, pieces: Sequence[torch.Tensor]) -> None:
        """Takes over a new piece, of the same dtype and device."""
        if pieces[0] is not self.pieces[0]:
            self._pad(pieces[0])

    def _pad(self, part: torch.Tensor) -> None:
        self._is_patched = BEFORE in vars(part)
        if self._is_patched:
            # 4. It keeps its identity, and lets go of the row in which it lay.
            part.data = part.clone()
            self._padded, self.pieces = part, [part]
            return
        # 1. Of the class of the parameter, with memory of its own.
        self._padded = part.new_zeros(self._cut.local_shape(0)).to(self._home)
        piece = self._padded.narrow(self._cut.dim, 0, part.shape[self._cut.dim])
        piece.copy_(part)
        self.pieces = [piece]

    def stamp(self) -> object:
        """Never the same: what is inside of a class of its own can change unseen."""
        return object()

    def gather(self, lane: Lane, name: str | None = None) -> list[Promise]:
        """Asks the shard what to send, and sends it."""
        if self._freed_at is not None:
            # What the class has made of it on the lane, the metadata, was read until then.
            lane.follow(self._freed_at)
        shard = self._padded if self._is_patched else self._padded.to(self.device, non_blocking=True)
        tensors, self._metadata = self._ask(shard)
        sent = [self._filled_up(tensor).to(self.device).contiguous() for tensor in tensors]
        num = 1 if self.group is None else self.group.size
        if not self._outputs:
            self._outputs = [t.new_empty((num * t.shape[0], *t.shape[1:])) for t in sent]
        promises = []
        for tensor, output in zip(sent, self._outputs, strict=True):
            output.untyped_storage().resize_(output.numel() * output.element_size())
            work = NOTHING
            if self.group is None:
                output.copy_(tensor)
            else:
                work = collectives.gather(self.group, output.view(-1), tensor.view(-1), name)
            promises.append(lane.promise(work))
        return promises

    def _ask(self, shard: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        before, shape = getattr(shard, BEFORE), self._cut.shape
        told = [self._mesh, shape, torch.empty(shape, device="meta").stride(), self._module, self._policy]
        if len(inspect.signature(before).parameters) == 1:
            # The signature of earlier torch versions.
            told = told[:1]
        answer: tuple[tuple[torch.Tensor, ...], Any] = before(*told)
        return answer

    def _filled_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """4. What was made of a shard without padding, with padding."""
        full = self._cut.local_shape(0)
        if not self._is_patched or tensor.shape != self._padded.shape or tensor.shape == full:
            return tensor
        padded = tensor.new_zeros(full)
        padded.narrow(self._cut.dim, 0, tensor.shape[self._cut.dim]).copy_(tensor)
        return padded

    def arrive(self) -> None:
        """2. Makes the leaf, or lets it be filled."""
        for tensor, num_bytes in self._inner:
            tensor.untyped_storage().resize_(num_bytes)
        after: Any = getattr(self._padded, AFTER)
        if not self.leaves[0].is_meta:
            after(tuple(self._outputs), self._metadata, self.dtype, out=self.leaves[0])
            return
        tensor, inner = after(tuple(self._outputs), self._metadata, self.dtype)
        self._inner = [(one, one.untyped_storage().size()) for one in inner]
        shape = self._cut.shape
        if tensor.ndim == len(shape):
            # Without the rows that were padding; whatever the strides.
            tensor = tensor[tuple(map(slice, shape))]
        else:
            tensor = tensor.as_strided(shape, torch.empty(shape, device="meta").stride(), 0)
        # `.data`, for a version counter of its own: what arrives later must not look like an edit.
        self.leaves = [nn.Parameter(tensor.data, requires_grad=False)]

    def free(self) -> None:
        """3. No memory for what has arrived, and for what was made of it."""
        for tensor in [*self._outputs, *(one for one, _ in self._inner)]:
            if tensor.untyped_storage().size():
                lifetime.release(tensor)
        self._freed_at = compute_event(self.device)

    def rest(self, group: Group) -> NoReturn:
        """Refuses: what the class makes of a gathered parameter cannot be cut again."""
        raise NotImplementedError(message("extension-in-parts", method=BEFORE))


def special_row(value: torch.Tensor, path: str) -> type[ExtendedRow] | None:
    """What makes the row of a parameter with the local tensor ``value``; ``None`` for an ordinary one.

    Raises:
        AssertionError: it has only one of the two methods.
    """
    has = [name for name in (BEFORE, AFTER) if hasattr(value, name)]
    if len(has) == 1:
        missing = AFTER if has == [BEFORE] else BEFORE
        raise AssertionError(
            message("half-extension", path=path, type=type(value).__name__, method=has[0], missing=missing)
        )
    return ExtendedRow if has else None
