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

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minifsdp.engine import collectives, lifetime
from minifsdp.engine.cut import Cut
from minifsdp.engine.lanes import NOTHING, Lane, Promise
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message

BEFORE, AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(frozen=True)
class ExtensionContext:
    """What the first method is told beside the parameter's size.

    Attributes:
        mesh: the ranks that gather, one axis.
        policy: the unit's precision as the user has given it.
        module: whose parameter it is.
    """

    mesh: Any
    policy: Any
    module: nn.Module


def is_extended(tensor: torch.Tensor, path: str) -> bool:
    """Whether ``tensor`` has the two methods.

    Raises:
        AssertionError: it has only one of them.
    """
    has = [name for name in (BEFORE, AFTER) if hasattr(tensor, name)]
    if len(has) == 1:
        missing = AFTER if has == [BEFORE] else BEFORE
        raise AssertionError(
            message("half-extension", path=path, type=type(tensor).__name__, method=has[0], missing=missing)
        )
    return bool(has)


class ExtendedRow:
    """One parameter whose class has the two methods; see `Row` for the verbs and attributes."""

    is_borrowed = False

    def __init__(
        self,
        cut: Cut,
        value: torch.Tensor,
        index: int,
        group: Group | None,
        device: torch.device,
        context: tuple[Any, Any, nn.Module],
        *,
        dtype: torch.dtype | None,
        offload: bool,
    ) -> None:
        self._cut, self._index, self._group, self._context = cut, index, group, ExtensionContext(*context)
        self.device, self.dtype = device, dtype or value.dtype
        self.num_bytes = cut.padded_numel * self.dtype.itemsize
        self._is_patched = False
        self._home = torch.device("cpu") if offload else device
        self._pad(cut.local_part(value, index))
        # Of a shape that fits, and without memory, until the first gather has made the real one.
        self.leaves = [nn.Parameter(torch.empty(cut.shape, dtype=self.dtype, device="meta"), requires_grad=False)]
        self._is_made = False
        self._outputs: list[torch.Tensor] = []
        self._inner: list[tuple[torch.Tensor, int]] = []
        self._metadata: Any = None
        self._lane: Lane

    def _pad(self, part: torch.Tensor) -> None:
        self._is_patched = BEFORE in vars(part)
        if self._is_patched:
            # 4. It keeps its identity, and lets go of the row in which it lay.
            part.data = part.clone()
            self._padded, self.pieces = part, [part]
            return
        # 1. Of the class of the parameter, with memory of its own.
        padded = part.new_zeros(self._cut.local_shape(0)).to(self._home)
        piece = padded.narrow(self._cut.dim, 0, part.shape[self._cut.dim])
        piece.copy_(part)
        self._padded, self.pieces = padded, [piece]

    @property
    def group(self) -> Group | None:
        """Who takes part in the next gather."""
        return self._group

    def stamp(self) -> object:
        """Never the same: what is inside of a class of its own can change unseen."""
        return object()

    def gather(self, lane: Lane) -> list[Promise]:
        """Asks the shard what to send, and sends it."""
        self._lane = lane
        stays = self._is_patched or self._home == self.device
        shard = self._padded if stays else self._padded.to(self.device, non_blocking=True)
        tensors, self._metadata = self._ask(shard)
        sent = [self._filled_up(tensor).to(self.device).contiguous() for tensor in tensors]
        num = 1 if self._group is None else self._group.size
        if not self._outputs:
            self._outputs = [t.new_empty((num * t.shape[0], *t.shape[1:])) for t in sent]
        promises = []
        for tensor, output in zip(sent, self._outputs, strict=True):
            output.untyped_storage().resize_(output.numel() * output.element_size())
            work = NOTHING
            if self._group is None:
                output.copy_(tensor)
            else:
                work = collectives.gather(self._group, output.view(-1), tensor.view(-1))
            promises.append(lane.promise(work))
        return promises

    def _ask(self, shard: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        before, shape = getattr(shard, BEFORE), self._cut.shape
        context = self._context
        if len(inspect.signature(before).parameters) == 1:
            # The signature of earlier torch versions.
            answer: tuple[tuple[torch.Tensor, ...], Any] = before(context.mesh)
            return answer
        stride = torch.empty(shape, device="meta").stride()
        return before(context.mesh, shape, stride, context.module, context.policy)  # type: ignore[no-any-return]

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
        if self._is_made:
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
        self._is_made = True

    def free(self) -> None:
        """3. No memory for what has arrived, and for what was made of it."""
        for tensor in [*self._outputs, *(one for one, _ in self._inner)]:
            if tensor.untyped_storage().size():
                lifetime.release(tensor)
        self._lane.hold(self._metadata)

    def rest(self, group: Group) -> None:
        """Refuses: what the class makes of a gathered parameter cannot be cut again."""
        raise NotImplementedError(message("extension-in-parts", method=BEFORE))

    def resting_pieces(self, group: Group) -> list[torch.Tensor]:
        """None: it never rests."""
        return []

    def wake(self) -> None:
        """The next gather comes from the shards, as ever."""

    def replace(self, pieces: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        """A new shard, perhaps of another dtype."""
        (piece,) = pieces
        if piece is self.pieces[0]:
            return
        if (dtype or piece.dtype) is not self.dtype or piece.device != self._home:
            self.dtype, self._is_made, self._outputs, self._inner = dtype or piece.dtype, False, [], []
        if self.device.type in ("meta", piece.device.type):
            self.device = piece.device
        self._home = piece.device
        self._pad(piece)


def special_row(value: torch.Tensor, path: str) -> type[ExtendedRow] | None:
    """What makes the row of a parameter with the local tensor ``value``; ``None`` for an ordinary one."""
    return ExtendedRow if is_extended(value, path) else None
