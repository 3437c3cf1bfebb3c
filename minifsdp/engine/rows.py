"""The parameters of a unit, sorted into rows: when it is made, and again when the user has put others in their place.

A row has one dtype and one mesh (see ``row.py``). Most units have one row. Others have several: a norm in float32
beside weights in bfloat16, experts that are cut over fewer ranks than what lies beside them, a parameter whose class
decides what is sent and which therefore lies alone.

Worked example, ``weight`` and ``bias`` in float32, one row ``w w b``. The user converts the module of ``weight`` to
bfloat16: what is found in its place has another dtype, so there are two rows from now on, ``w w`` and ``b``. Had both
been converted, it would still be one row, of another dtype.

Both times the same is done: the pieces are sorted by kind, and each row takes its own. A row that would have the same
parameters of the same kind as before is kept, with its memory and its leaves.

*In torch:* ``FSDPParam`` has its own memory; what is gathered together is sorted anew for each gather.

Spec: FS2-28, FS2-29, FS2-EXT-01, NEW-23.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine import misuse
from minifsdp.engine.dtensors import Sharding, piece_of, set_piece
from minifsdp.engine.layout import OwnedParameter, full_name
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.row import Options, Row

# A `Row`, or what is attached in its place and has its verbs.
AnyRow = Any
# Functions that are asked whether a parameter, given by its local tensor and its name, decides for itself what is sent;
# they answer what makes its row, or ``None``. Attached from outside, see ``minifsdp/__init__.py``.
special_rows: list[Callable[[torch.Tensor, str], Callable[..., AnyRow] | None]] = []


class Entry:
    """One parameter of the unit.

    Attributes:
        parameter: what the optimizer owns.
        leaf: what autograd owns and modules compute with.
        plain_leaf: the memory of `leaf`, which is the same unless tensor parallelism is at work.
        owned: shape and slots.
        sharding: how it is cut, and how a piece becomes a DTensor.
        row, number: in which row its memory lies, and as which of its parameters.
        piece: the local tensor that was put into `parameter`.
        unreduced: gradient that waits for its reduction.
        is_trained: whether `parameter` and `leaf` asked for a gradient when they last agreed.
    """

    parameter: nn.Parameter
    row: AnyRow
    number: int
    piece: torch.Tensor

    def __init__(self, owned: OwnedParameter, sharding: Sharding) -> None:
        self.owned, self.sharding = owned, sharding
        self.unreduced: torch.Tensor | None = None

    def replace(self, original: nn.Parameter) -> None:
        """Makes what takes the place of the user's parameter."""
        self.parameter = nn.Parameter(self.sharding.wrap(self.piece), requires_grad=original.requires_grad)
        # `nn.Parameter` detaches, which has put another local tensor into it.
        set_piece(self.parameter, self.piece)
        # What users have attached, say marks for optimizer groups. What a tensor subclass keeps there, its pieces have,
        # too, and the original's may be the whole values.
        for name in vars(original).keys() - vars(self.piece).keys():
            setattr(self.parameter, name, vars(original)[name])
        misuse.note_taken(original, self.owned.path, is_replaced=True)
        for slot in self.owned.slots:
            # Remembered by place, not by reference: with one, even a weak one, `to()` cannot swap what is in a DTensor.
            misuse.note_place(slot.module, slot.name, self.owned.path)
        self.make_leaf()

    def make_leaf(self) -> None:
        """A new leaf, after its row has made new memory for it."""
        self.plain_leaf = self.row.leaves[self.number]
        self.leaf = self.sharding.show_whole(self.plain_leaf)
        self.is_trained = self.parameter.requires_grad
        self.leaf.requires_grad_(self.is_trained)

    def follow_requires_grad(self) -> None:
        """The user has frozen `parameter` or `leaf`, whichever the module showed, or thawed it; the other follows."""
        self.is_trained = not self.is_trained
        self.leaf.requires_grad_(self.is_trained)
        self.parameter.requires_grad_(self.is_trained)


class Rows:
    """The rows of one unit, and the entries of the parameters that lie in them.

    Args:
        parameters: at least one.
        shardings: how each is cut.
        options: where and in which dtype its values live and are computed with.

    Attributes:
        entries: one for each parameter, in order.
        rows: at least one.
    """

    def __init__(
        self, parameters: Mapping[nn.Parameter, OwnedParameter], shardings: Sequence[Sharding], options: Options
    ) -> None:
        self._options = options
        self._made: dict[object, AnyRow] = {}
        self.entries = [Entry(owned, sharding) for owned, sharding in zip(parameters.values(), shardings, strict=True)]
        self._sort([sharding.cut_out_of(original) for original, sharding in zip(parameters, shardings, strict=True)])
        for entry, original in zip(self.entries, parameters, strict=True):
            entry.replace(original)

    def _sort(self, pieces: Sequence[torch.Tensor]) -> None:
        """Gives each entry's piece a place in a row of one dtype and mesh; a special one lies alone."""
        sorted_in: dict[Any, list[int]] = {}
        for number, (entry, piece) in enumerate(zip(self.entries, pieces, strict=True)):
            special = next(filter(None, (ask(piece, entry.owned.path) for ask in special_rows)), None)
            alone = number if special else None
            sorted_in.setdefault((special, alone, piece.dtype, entry.sharding.table), []).append(number)
        before, self._made = self._made, {}
        for (special, *_), numbers in sorted_in.items():
            mine = [pieces[number] for number in numbers]
            key = (special, mine[0].dtype, self._options.home_of(mine[0]), *numbers)
            row = before.get(key)
            if row is None:
                row = self._make(special, numbers, mine)
            else:
                row.take(mine)
            self._made[key] = row
            for place, number in enumerate(numbers):
                entry = self.entries[number]
                entry.row, entry.number, entry.piece = row, place, row.pieces[place]
        self.rows = list(self._made.values())

    def _make(self, special: Any, numbers: list[int], pieces: list[torch.Tensor]) -> AnyRow:
        entries = [self.entries[number] for number in numbers]
        cuts, first = [entry.sharding.cut for entry in entries], entries[0].sharding
        if special is None:
            return Row(cuts, pieces, first.table.shard, self._options)
        module = entries[0].owned.slots[0].module
        return special(cuts[0], pieces[0], first.table.shard, self._options, first.shard_axis, module)

    def rest(self, group: Group, mesh: DeviceMesh) -> list[torch.Tensor]:
        """Lets all rows rest on the ranks of ``group``, the last axis of ``mesh``; returns DTensors over that mesh."""
        pieces = {id(row): row.rest(group) for row in self.rows}
        shown: list[torch.Tensor] = []
        for entry in self.entries:
            whole = entry.sharding.wrap_among(mesh, pieces[id(entry.row)][entry.number])
            requires_grad = entry.parameter.requires_grad
            shown.append(entry.parameter if whole is None else nn.Parameter(whole, requires_grad=requires_grad))
        return shown

    def take_over(self, unit_name: str) -> None:
        """Puts what the parameters hold now into their rows.

        Raises:
            RuntimeError: they are on different devices.
        """
        pieces = [piece_of(entry.parameter) for entry in self.entries]
        if len({piece.device for piece in pieces}) > 1:
            raise _converted_apart(self.entries, unit_name)
        # From now on they live where the user has put them.
        self._options = replace(self._options, offload=False)
        self._sort(pieces)
        for entry in self.entries:
            set_piece(entry.parameter, entry.piece)


def _converted_apart(entries: Sequence[Entry], unit_name: str) -> RuntimeError:
    paths = [f"{full_name(unit_name, entry.owned.path)} ({piece_of(entry.parameter).device})" for entry in entries]
    return RuntimeError(message("converted-apart", parameters=", ".join(paths)))
