"""The parameters of a unit, sorted into rows: when it is made, and again when the user has put others in their place.

A row has one dtype and one mesh (see ``row.py``). Most units have one row. Others have several: a norm in float32
beside weights in bfloat16, experts that are cut over fewer ranks than what lies beside them, a parameter whose class
decides what is sent and which therefore lies alone.

Worked example, ``weight`` and ``bias`` in float32, one row ``w w b``. The user converts the module of ``weight`` to
bfloat16: what is found in its place has another dtype, so there are two rows from now on, ``w w`` and ``b``. Had both
been converted, it would still be one row, of another dtype.

*In torch:* ``FSDPParam`` has its own memory; what is gathered together is sorted anew for each gather.

Spec: FS2-28, FS2-29, FS2-EXT-01, NEW-23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine import misuse
from minifsdp.engine.dtensors import Sharding, piece_of, set_piece
from minifsdp.engine.lanes import Promise
from minifsdp.engine.layout import OwnedParameter, full_name
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.row import Row

# A `Row`, or what is attached in its place and has its verbs.
AnyRow = Any
# Who is asked, with its local tensor and its name, whether a parameter decides for itself what is sent; the answer is
# what makes its row, or ``None``. Attached from outside, see ``minifsdp/__init__.py``.
special_rows: list[Callable[[torch.Tensor, str], Callable[..., AnyRow] | None]] = []


def _special_row(value: torch.Tensor, path: str) -> Callable[..., AnyRow] | None:
    return next(filter(None, (ask(value, path) for ask in special_rows)), None)


class Entry:
    """One parameter of the unit.

    Attributes:
        parameter: what the optimizer owns.
        leaf: what autograd owns and modules compute with.
        plain_leaf: the memory of `leaf`, which is the same unless tensor parallelism is at work.
        owned: shape and slots.
        sharding: how it is cut, and how a piece becomes a DTensor.
        row, number: where its memory lies.
        piece: the local tensor that was put into `parameter`.
        unreduced: gradient that waits for its reduction.
        is_trained: whether `parameter` and `leaf` asked for a gradient when they last agreed.
    """

    __slots__ = (
        "is_trained",
        "leaf",
        "number",
        "owned",
        "parameter",
        "piece",
        "plain_leaf",
        "row",
        "sharding",
        "unreduced",
    )

    def __init__(self, original: nn.Parameter, owned: OwnedParameter, sharding: Sharding, row: AnyRow, number: int):
        self.owned, self.sharding, self.row, self.number = owned, sharding, row, number
        self.unreduced: torch.Tensor | None = None
        self.piece = row.pieces[number]
        self.parameter = nn.Parameter(sharding.wrap(self.piece), requires_grad=original.requires_grad)
        # To become a parameter it was detached, so that there is another local tensor in it.
        set_piece(self.parameter, self.piece)
        # Marks that users put on parameters, for their optimizer groups say. What a class keeps there, the whole values
        # perhaps, its pieces have as well.
        for name in vars(original).keys() - vars(self.piece).keys():
            setattr(self.parameter, name, vars(original)[name])
        misuse.note_taken(original, owned.path, is_replaced=True)
        for slot in owned.slots:
            # Remembered by its place: `to()` and others swap what is in a DTensor, if there is no reference to it.
            misuse.note_place(slot.module, slot.name, owned.path)
        self.make_leaf()

    def make_leaf(self) -> None:
        """A new leaf, after its row has made new memory for it."""
        self.plain_leaf = self.row.leaves[self.number]
        self.leaf = self.sharding.show_whole(self.plain_leaf)
        self.is_trained = self.parameter.requires_grad
        self.leaf.requires_grad_(self.is_trained)

    def turn(self) -> None:
        """The user has frozen or thawed one of the two, whichever the module showed; the other follows."""
        self.is_trained = not self.is_trained
        self.leaf.requires_grad_(self.is_trained)
        self.parameter.requires_grad_(self.is_trained)


class Rows:
    """The rows of one unit, and the entries of the parameters that lie in them.

    Args:
        parameters: at least one.
        shardings: how each is cut.
        device: the compute device.
        compute_dtype: of floating-point parameters; ``None`` means the stored one.
        offload: whether pieces live on the CPU.
        pin: whether pinned, if so.
        policy: the user's precision, for parameters that decide for themselves what is sent.

    Attributes:
        entries: one for each parameter, in order.
        rows: at least one.
    """

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, OwnedParameter],
        shardings: Sequence[Sharding],
        device: torch.device,
        *,
        compute_dtype: torch.dtype | None,
        offload: bool,
        pin: bool,
        policy: Any,
    ) -> None:
        self.device, self._compute_dtype, self._offloads, self._pins = device, compute_dtype, offload, pin
        self._owned, self._shardings, self._policy = list(parameters.values()), shardings, policy
        originals = list(parameters)
        values = [sharding.local_of(original) for sharding, original in zip(shardings, originals, strict=True)]
        self.rows: list[AnyRow] = []
        entries: dict[int, Entry] = {}
        for numbers in self._sort(values):
            row = self._make([values[n] for n in numbers], numbers)
            self.rows.append(row)
            for place, n in enumerate(numbers):
                entries[n] = Entry(originals[n], self._owned[n], shardings[n], row, place)
        self.entries = [entries[n] for n in range(len(originals))]

    def _sort(self, values: Sequence[torch.Tensor]) -> list[list[int]]:
        """Numbers of the parameters of each row: of one dtype and mesh; who decides what is sent lies alone."""
        rows: dict[object, list[int]] = {}
        for number, value in enumerate(values):
            is_alone = _special_row(value, self._owned[number].path) is not None
            key = number if is_alone else (value.dtype, self._shardings[number].table)
            rows.setdefault(key, []).append(number)
        return list(rows.values())

    def _make(self, values: list[torch.Tensor], numbers: list[int], like: torch.Tensor | None = None) -> AnyRow:
        """A row of ``values``, of the kind that ``like`` asks for, or the first of them."""
        cuts, first = [self._shardings[n].cut for n in numbers], self._shardings[numbers[0]]
        index, group, dtype = first.table.shard_index, first.table.shard, self._compute_dtype_of(values[0].dtype)
        slot = self._owned[numbers[0]].slots[0]
        special = _special_row(values[0] if like is None else like, slot.path)
        if special is None:
            return Row(cuts, values, index, group, self.device, dtype=dtype, offload=self._offloads, pin=self._pins)
        context = (first.shard_axis, self._policy, slot.module)
        return special(cuts[0], values[0], index, group, self.device, context, dtype=dtype, offload=self._offloads)

    def _compute_dtype_of(self, stored: torch.dtype) -> torch.dtype | None:
        return self._compute_dtype if stored.is_floating_point else None

    def resting(self, group: Group, mesh: DeviceMesh) -> list[torch.Tensor]:
        """The parameters as DTensors among the few ranks of ``group``, the last axis of ``mesh``; rows rest already."""
        pieces = {id(row): row.resting_pieces(group) for row in self.rows}
        shown: list[torch.Tensor] = []
        for entry in self.entries:
            whole = entry.sharding.wrap_among(mesh, pieces[id(entry.row)][entry.number])
            requires_grad = entry.parameter.requires_grad
            shown.append(entry.parameter if whole is None else nn.Parameter(whole, requires_grad=requires_grad))
        return shown

    # --- after edits ---

    def take_over(self, unit_name: str) -> None:
        """Puts what the parameters hold now into their rows.

        Raises:
            RuntimeError: parameters of one row are on different devices.
        """
        if self.notice_methods():
            return
        self.rows = [part for row in self.rows for part in self._take_over_row(row, unit_name)]
        for entry in self.entries:
            entry.piece = entry.row.pieces[entry.number]
            set_piece(entry.parameter, entry.piece)

    def _take_over_row(self, row: AnyRow, unit_name: str) -> list[AnyRow]:
        """The row, or one for each dtype that its parameters have now."""
        by_dtype: dict[torch.dtype, list[Entry]] = {}
        mine = [entry for entry in self.entries if entry.row is row]
        for entry in mine:
            by_dtype.setdefault(piece_of(entry.parameter).dtype, []).append(entry)
        pieces = {dtype: [piece_of(entry.parameter) for entry in entries] for dtype, entries in by_dtype.items()}
        if len({piece.device for found in pieces.values() for piece in found}) > 1:
            raise _converted_apart(mine, unit_name)
        if len(by_dtype) == 1 or not isinstance(row, Row):
            (dtype,) = by_dtype
            row.replace(pieces[dtype], self._compute_dtype_of(dtype))
            return [row]
        parts: list[AnyRow] = []
        for dtype, entries in by_dtype.items():
            numbers = [entry.number for entry in entries]
            parts.append(row.part(numbers, pieces[dtype], self._compute_dtype_of(dtype)))
            for number, entry in enumerate(entries):
                entry.row, entry.number = parts[-1], number
        return parts

    def notice_methods(self) -> bool:
        """Sorts anew if local tensors have begun to decide what is sent, or have ceased to; whether any."""
        pieces = [piece_of(entry.parameter) for entry in self.entries]
        is_special = [_special_row(p, owned.path) is not None for p, owned in zip(pieces, self._owned, strict=True)]
        if is_special == [not isinstance(entry.row, Row) for entry in self.entries]:
            return False
        # Values that came late, for a model that was built without any, have brought a device.
        self.device = self.rows[0].device
        self.rows = [self._row_of(numbers, pieces) for numbers in self._sort(pieces)]
        return True

    def _row_of(self, numbers: list[int], pieces: list[torch.Tensor]) -> AnyRow:
        """A row of parameters that are cut already."""
        entries, mine = [self.entries[n] for n in numbers], [pieces[n] for n in numbers]
        if self.device.type == "meta":
            self.device = mine[0].device
        # The whole of each is nowhere; what stands in for it has no memory.
        nothing = torch.zeros((), dtype=mine[0].dtype, device=mine[0].device)
        row = self._make([nothing.expand(entry.sharding.cut.shape) for entry in entries], numbers, like=mine[0])
        row.replace(mine, self._compute_dtype_of(mine[0].dtype))
        for place, entry in enumerate(entries):
            entry.row, entry.number, entry.piece = row, place, row.pieces[place]
            set_piece(entry.parameter, entry.piece)
        return row


class Arrival:
    """The promise that all rows of a unit are there, and sorted: ``sort`` is called at the end."""

    __slots__ = ("_promises", "_sort")

    def __init__(self, promises: list[Promise], sort: Callable[[], None]) -> None:
        self._promises, self._sort = promises, sort

    def wait(self) -> None:
        """Waits, and sorts."""
        for promise in self._promises:
            promise.wait()
        self._sort()


def _converted_apart(entries: Sequence[Entry], unit_name: str) -> RuntimeError:
    paths = [f"{full_name(unit_name, entry.owned.path)} ({piece_of(entry.parameter).device})" for entry in entries]
    return RuntimeError(message("converted-apart", parameters=", ".join(paths)))
