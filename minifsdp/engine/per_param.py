"""Layout 2: one DTensor for each parameter.

Every parameter keeps its name, its shape and its own row of the table: what the optimizer owns is a ``DTensor``, which
knows the whole shape and holds this rank's rows of it. Printing, saving, clipping and filtering work on it as on any
parameter.

Worked example, ``weight`` of shape (3, 2) and ``bias`` of shape (3,), two ranks::

    rank 0    weight 2 rows, bias 2 elements     sends w w w w b b
    rank 1    weight 1 row,  bias 1 element      sends w w . . b .
    gathered  w w w w b b w w . . b .            sorted by rank
    whole     w w w w w w . .   b b b .          sorted by parameter: two leaves that autograd owns

How memory lies and travels is told in ``row.py``; a unit has a row for each dtype among its parameters, nearly always
one, and for each mesh: experts may be cut over fewer ranks than what lies beside them. Here is what the unit sees of
it, and the way of the gradients:

1. only parameters that have a gradient take part in the reduction. Frozen ones cost nothing, unlike in a flat layout;
2. each gradient is cut like its parameter and the pieces are sorted by rank, in one operator for all of them;
   Those of each mesh are reduced by themselves, see `part_over`;
3. what comes back is a row of this rank's pieces, and ``.grad`` of each DTensor is a DTensor around its part of it.

Users may replace what they see: ``load_state_dict(assign=True)``, ``to_empty``, ``model.to(...)`` put other tensors in
place. Once in an iteration the layout looks, takes the new values into its row and goes on. Not earlier: where several
modules share a unit, they are converted one after the other, and in between the unit is of two kinds. If it is when
the look comes, ``weight`` in bfloat16 and ``bias`` in float32, the row is replaced by one for each dtype.

Trade-off against the flat layout: a copy out for each gather, a sorted copy of the gradients, and DTensors in the
optimizer; in exchange no tensor is anonymous, and frozen and trained parameters, or several dtypes, can share a unit.

*In torch:* ``FSDPParam`` and ``FSDPParamGroup``, 2053 lines.

Spec: FS2-04 to FS2-08, FS2-13, FS2-19, FS2-22, FS2-28, FS2-MP-02, FS2-MP-03, FS2-SYNC-02, FS2-META-03, NEW-23,
STREAM-05, STREAM-10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine import lifetime, misuse
from minifsdp.engine.dtensors import Sharding, piece_of, set_piece
from minifsdp.engine.extension import ExtendedRow, ExtensionContext, is_extended
from minifsdp.engine.lanes import Lane, Lanes, Promise
from minifsdp.engine.layout import Gradient, Layout, OwnedParameter, rebound
from minifsdp.engine.lifetime import ReleaseEvent
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.messages import message
from minifsdp.engine.row import VERSION, Row


class _Entry:
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

    def __init__(
        self, original: nn.Parameter, owned: OwnedParameter, sharding: Sharding, row: Row | ExtendedRow, number: int
    ):
        self.owned, self.sharding, self.row, self.number = owned, sharding, row, number
        self.unreduced: torch.Tensor | None = None
        self.piece = row.pieces[number]
        self.parameter = nn.Parameter(sharding.wrap(self.piece), requires_grad=original.requires_grad)
        for name, value in vars(original).items():
            # Marks that users put on parameters, for their optimizer groups say.
            setattr(self.parameter, name, value)
        self.make_leaf()

    def make_leaf(self) -> None:
        self.plain_leaf = self.row.leaves[self.number]
        self.leaf = self.sharding.show_whole(self.plain_leaf)
        self.is_trained = self.parameter.requires_grad
        self.leaf.requires_grad_(self.is_trained)

    def turn(self) -> None:
        """The user has frozen or thawed one of the two, whichever the module showed; the other follows."""
        self.is_trained = not self.is_trained
        self.leaf.requires_grad_(self.is_trained)
        self.parameter.requires_grad_(self.is_trained)


class PerParameterLayout(Layout):
    """The parameters of one unit, each a DTensor.

    Args:
        parameters: at least one, of any dtypes, frozen or not.
        shardings: how each is cut.
        device: the compute device.
        compute_dtype: dtype of the unsharded tensors of floating-point parameters; ``None`` means the stored one.
        unreduced_dtype: dtype in which gradients are kept until they are reduced; ``None`` means their own.
        offload: whether pieces live on the CPU.
        pin: whether pinned, if so.
        policy: the user's precision, for parameters that decide for themselves what is sent.

    Attributes:
        meshes: who shares; nearly always one.
        resting_mesh: the mesh over which modules show a unit that rests on a larger piece; its last axis are the few
            ranks that have the others. ``None`` if it never does.
    """

    signals_gradient = False

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, OwnedParameter],
        shardings: Sequence[Sharding],
        device: torch.device,
        *,
        compute_dtype: torch.dtype | None = None,
        unreduced_dtype: torch.dtype | None = None,
        offload: bool = False,
        pin: bool = True,
        policy: Any = None,
    ) -> None:
        self._policy, self._shardings = policy, shardings
        self.meshes = list(dict.fromkeys(sharding.table for sharding in shardings))
        self.resting_mesh: DeviceMesh | None = None
        self.device, self.offloads, self._pins = device, offload, pin
        self.parameters = list(parameters.values())
        self._compute_dtype, self._unreduced_dtype = compute_dtype, unreduced_dtype
        originals = list(parameters)
        values = [sharding.local_of(original) for sharding, original in zip(shardings, originals, strict=True)]
        self._rows: list[Row | ExtendedRow] = []
        entries: dict[int, _Entry] = {}
        for numbers in self._sort_by_row(values):
            wholes = [values[n] for n in numbers]
            row = self._make_row(wholes, numbers, is_extended=self._is_extended(numbers[0], wholes[0]))
            self._rows.append(row)
            for place, n in enumerate(numbers):
                entries[n] = _Entry(originals[n], self.parameters[n], shardings[n], row, place)
        self._entries = [entries[n] for n in range(len(originals))]
        self._places = [
            (slot.module._parameters, slot, index)
            for index, owned in enumerate(self.parameters)
            for slot in owned.slots
        ]
        for original, entry in zip(originals, self._entries, strict=True):
            misuse.note_taken(original, entry.owned.path, is_replaced=True)
            for slot in entry.owned.slots:
                # Remembered by its place: `to()` and others swap what is in a DTensor, if there is no reference to it.
                misuse.note_place(slot.module, slot.name, entry.owned.path)
        self._gathered_at: object = None
        self._has_copied = False
        self._resting: list[torch.Tensor] | None = None
        self._describe()
        self._show(self._sharded)

    def _sort_by_row(self, values: Sequence[torch.Tensor]) -> list[list[int]]:
        """Numbers of the parameters of each row: of one dtype and mesh; who decides what is sent lies alone."""
        rows: dict[object, list[int]] = {}
        for number, value in enumerate(values):
            is_alone = self._is_extended(number, value)
            key = number if is_alone else (value.dtype, self._shardings[number].table)
            rows.setdefault(key, []).append(number)
        return list(rows.values())

    def _is_extended(self, number: int, value: torch.Tensor) -> bool:
        return is_extended(value, self.parameters[number].path)

    def _make_row(self, values: list[torch.Tensor], numbers: list[int], *, is_extended: bool) -> Row | ExtendedRow:
        cuts, first = [self._shardings[n].cut for n in numbers], self._shardings[numbers[0]]
        index, group, dtype = first.table.shard_index, first.table.shard, self._compute_dtype_of(values[0].dtype)
        if not is_extended:
            return Row(cuts, values, index, group, self.device, dtype=dtype, offload=self.offloads, pin=self._pins)
        context = ExtensionContext(first.shard_axis, self._policy, self.parameters[numbers[0]].slots[0].module)
        return ExtendedRow(cuts[0], values[0], index, group, self.device, context, dtype=dtype, offload=self.offloads)

    def _compute_dtype_of(self, stored: torch.dtype) -> torch.dtype | None:
        return self._compute_dtype if stored.is_floating_point else None

    def _describe(self) -> None:
        """What follows from the rows, and is asked for often."""
        trained = next((entry.row for entry in self._entries if entry.parameter.requires_grad), self._rows[0])
        # Values that came late, for a model that was built without any, have brought a device.
        self.dtype, self.device = trained.dtype, self._rows[0].device
        self.num_bytes = sum(row.num_bytes for row in self._rows)
        self._is_borrowed = all(row.is_borrowed for row in self._rows)
        self._sharded: list[torch.Tensor] = [entry.parameter for entry in self._entries]
        self._leaves: list[torch.Tensor] = [entry.leaf for entry in self._entries]

    # --- the unsharded tensors ---

    def on_gradient(self, notify: Any) -> None:
        """Nothing is called: with a leaf for each parameter, none of them knows whether the others are complete."""

    def settle(self) -> None:
        """Adapts to what was done to the parameters since, and makes sure that they have values.

        Raises:
            RuntimeError: some of them are on the meta device.
        """
        self.notice_edits()
        self._notice_methods()
        without = [self.full_name(entry.owned.path) for entry in self._entries if entry.piece.device.type == "meta"]
        if without:
            raise RuntimeError(message("still-meta", without=without))

    @property
    def is_trained(self) -> bool:
        """Whether a backward will end in a gradient."""
        return any(entry.parameter.requires_grad for entry in self._entries)

    # --- memory ---

    @property
    def gather_group(self) -> Group | None:
        """Who takes part in the next gather."""
        return next((row.group for row in self._rows if row.group is not None), None)

    def gather(self, lanes: Lanes) -> Promise | None:
        """Issues one gather for each row, nearly always one."""
        self._gathered_at = self._stamp()
        if self._has_copied:
            # Since the lane has last followed the compute stream.
            lanes.gather.follow()
            self._has_copied = False
        with lanes.gather as lane:
            lane.let_go()
            promises = [promise for row in self._rows for promise in row.gather(lane)]
        return _Arrival(promises, self, lanes.gather)

    def arrive(self, lane: Lane) -> None:
        """Sorts what has arrived; called once it has."""
        for row in self._rows:
            buffer = row.arrive()
            if buffer is not None:
                lane.hold(buffer)
        if any(entry.plain_leaf is not entry.row.leaves[entry.number] for entry in self._entries):
            # The first gather of a parameter that makes its own leaf.
            self._renew_leaves()

    def free(self) -> ReleaseEvent | None:
        """Gives the memory of all leaves back."""
        for row in self._rows:
            row.free()
        return None if self._is_borrowed else lifetime.DONE

    def rest(self, group: Group) -> None:
        """The next gather will come from what the ranks of ``group`` keep between them; `free` must follow."""
        for row in self._rows:
            row.rest(group)
        if self.resting_mesh is not None and not self._is_borrowed:
            self._resting = self._rested(group, self.resting_mesh)

    def _rested(self, group: Group, mesh: DeviceMesh) -> list[torch.Tensor]:
        """What modules show meanwhile: the parameters as DTensors among the few ranks."""
        pieces = {id(row): row.resting_pieces(group) for row in self._rows}
        shown: list[torch.Tensor] = []
        for entry in self._entries:
            whole = entry.sharding.wrap_among(mesh, pieces[id(entry.row)][entry.number])
            requires_grad = entry.parameter.requires_grad
            shown.append(entry.parameter if whole is None else nn.Parameter(whole, requires_grad=requires_grad))
        return shown

    def wake(self) -> None:
        """The next gather comes from the shards again."""
        for row in self._rows:
            row.wake()
        resting, self._resting = self._resting, None
        if resting is not None and self._shown is resting:
            self._show(self._sharded)

    def _stamp(self) -> object:
        # What is done to a DTensor is counted at the DTensor; what is done to its local tensor, at the row.
        return [row.stamp() for row in self._rows], list(map(VERSION, self._sharded))

    def is_stale(self) -> bool:
        """Whether a shard has been changed since the last gather began."""
        return self._gathered_at != self._stamp()

    # --- what modules see ---

    def notice_edits(self) -> None:
        """Takes over tensors that the user has put in place of ours, and values that are in other memory.

        Raises:
            RuntimeError: what was put there is not a parameter of this shape and placement.
        """
        is_edited = False
        for dictionary, slot, index in self._places:
            found, entry = dictionary.get(slot.name), self._entries[index]
            if found is not self._shown[index]:
                if not isinstance(found, nn.Parameter) or not entry.sharding.fits(found):
                    raise rebound(slot, self.name)
                entry.parameter, is_edited = found, True
            elif piece_of(entry.parameter) is not entry.piece:
                is_edited = True
        if is_edited:
            self._take_over()

    def _take_over(self) -> None:
        if self._notice_methods():
            return
        self._rows = [part for row in self._rows for part in self._take_over_row(row)]
        self._has_copied = True
        for entry in self._entries:
            entry.piece = entry.row.pieces[entry.number]
            set_piece(entry.parameter, entry.piece)
        self._renew_leaves()

    def _take_over_row(self, row: Row | ExtendedRow) -> list[Row | ExtendedRow]:
        """Puts what the parameters hold now into their row, or into one row for each dtype that they have now."""
        by_dtype: dict[torch.dtype, list[_Entry]] = {}
        for entry in self._entries:
            if entry.row is row:
                by_dtype.setdefault(piece_of(entry.parameter).dtype, []).append(entry)
        pieces = {dtype: [piece_of(entry.parameter) for entry in entries] for dtype, entries in by_dtype.items()}
        if len({piece.device for found in pieces.values() for piece in found}) > 1:
            raise self._converted_apart(row)
        if len(by_dtype) == 1 or isinstance(row, ExtendedRow):
            (dtype,) = by_dtype
            row.replace(pieces[dtype], self._compute_dtype_of(dtype))
            return [row]
        parts: list[Row | ExtendedRow] = []
        for dtype, entries in by_dtype.items():
            numbers = [entry.number for entry in entries]
            parts.append(row.part(numbers, pieces[dtype], self._compute_dtype_of(dtype)))
            for number, entry in enumerate(entries):
                entry.row, entry.number = parts[-1], number
        return parts

    def _converted_apart(self, row: Row | ExtendedRow) -> RuntimeError:
        paths = [
            f"{self.full_name(entry.owned.path)} ({piece_of(entry.parameter).device})"
            for entry in self._entries
            if entry.row is row
        ]
        return RuntimeError(message("converted-apart", parameters=", ".join(paths)))

    def _notice_methods(self) -> bool:
        """Sorts the parameters into rows anew if local tensors were given the two methods, or have lost them."""
        pieces = [piece_of(entry.parameter) for entry in self._entries]
        now = [self._is_extended(number, piece) for number, piece in enumerate(pieces)]
        if now == [isinstance(entry.row, ExtendedRow) for entry in self._entries]:
            return False
        self._rows = [self._row_of(numbers, pieces) for numbers in self._sort_by_row(pieces)]
        self._has_copied = True
        self._renew_leaves()
        return True

    def _row_of(self, numbers: list[int], pieces: list[torch.Tensor]) -> Row | ExtendedRow:
        """A row of parameters that are cut already."""
        entries, mine = [self._entries[n] for n in numbers], [pieces[n] for n in numbers]
        if self.device.type == "meta":
            self.device = mine[0].device
        # The whole of each is nowhere; what stands in for it has no memory.
        nothing = torch.zeros((), dtype=mine[0].dtype, device=mine[0].device)
        wholes = [nothing.expand(entry.sharding.cut.shape) for entry in entries]
        row = self._make_row(wholes, numbers, is_extended=self._is_extended(numbers[0], mine[0]))
        row.replace(mine, self._compute_dtype_of(mine[0].dtype))
        for place, entry in enumerate(entries):
            entry.row, entry.number, entry.piece = row, place, row.pieces[place]
            set_piece(entry.parameter, entry.piece)
        return row

    def _renew_leaves(self) -> None:
        for entry in self._entries:
            if entry.plain_leaf is not entry.row.leaves[entry.number]:
                entry.make_leaf()
        shows_leaves = self._shown is self._leaves
        self._describe()
        self._resting = None
        self._show(self._leaves if shows_leaves else self._sharded)

    def show_unsharded(self) -> None:
        """Puts the leaves on the modules; the same ones every time."""
        self._show(self._leaves)

    def show_again(self) -> None:
        """As in forward."""
        self._show(self._leaves)

    def show_resting(self, *, is_kept: bool) -> None:
        """What is there is shown."""

    def show_sharded(self) -> None:
        """Puts the DTensors on the modules."""
        self._show(self._sharded if self._resting is None else self._resting)

    def _show(self, tensors: list[torch.Tensor]) -> None:
        for entry in self._entries:
            if not entry.leaf.requires_grad is entry.parameter.requires_grad is entry.is_trained:
                entry.turn()
        self._shown = tensors
        for dictionary, slot, index in self._places:
            dictionary[slot.name] = tensors[index]  # type: ignore[assignment]
            if slot.second_list:
                slot.update_second_list(tensors[index])

    # --- gradients ---

    @property
    def has_gradient(self) -> bool:
        """Whether autograd has left a gradient here that was not taken."""
        return any(entry.leaf.grad is not None for entry in self._entries)

    def take_gradient(self, *, with_unreduced: bool) -> Gradient | None:
        """1. The gradients of the parameters that have one."""
        taken = Gradient([], [])
        for number, entry in enumerate(self._entries):
            grad, entry.leaf.grad = entry.leaf.grad, None
            # Only where tensor parallelism is at work is there anything around the gradient.
            part = grad if grad is None or entry.leaf is entry.plain_leaf else entry.sharding.local_gradient(grad)
            if with_unreduced and entry.unreduced is not None:
                part = entry.unreduced if part is None else entry.unreduced.add_(part)
                entry.unreduced = None
            if part is None and self.reduces_unused and with_unreduced and entry.parameter.requires_grad:
                part = torch.zeros(entry.sharding.cut.shape, dtype=entry.leaf.dtype, device=self.device)
            if part is not None and part.numel():
                # A parameter without elements has nothing to reduce.
                taken.numbers.append(number)
                taken.parts.append(part)
        return taken if taken.parts else None

    def part_over(self, mesh: Mesh, gradient: Gradient) -> Gradient:
        """The gradients of the parameters that are cut over ``mesh``."""
        part = Gradient([])
        for number, grad in zip(gradient.numbers, gradient.parts, strict=True):
            if self._shardings[number].table == mesh:
                part.numbers.append(number)
                part.parts.append(grad)
        return part

    def keep_unreduced(self, gradient: Gradient) -> None:
        """Adds to what waits, in the dtype in which it will travel."""
        for number, part in zip(gradient.numbers, gradient.parts, strict=True):
            entry = self._entries[number]
            if entry.unreduced is None:
                entry.unreduced = part.to(self._unreduced_dtype or part.dtype)
            else:
                entry.unreduced.add_(part)

    @property
    def has_unreduced(self) -> bool:
        """Whether something waits for its reduction."""
        return any(entry.unreduced is not None for entry in self._entries)

    def pack(self, gradient: Gradient, dtype: torch.dtype) -> torch.Tensor:
        """2. Cut and sorted by rank; where rows are missing, zeros."""
        parts, dtypes, numel = [], set(), 0
        num = self._shardings[gradient.numbers[0]].cut.num_shards
        for number, part in zip(gradient.numbers, gradient.parts, strict=True):
            cut = self._entries[number].sharding.cut
            parts.append(part if cut.dim == 0 else torch.cat(part.chunk(num, cut.dim)))
            dtypes.add(part.dtype)
            numel += cut.padded_numel
        if len(dtypes) > 1:
            parts = [part.to(dtype) for part in parts]
        row = torch.empty(numel, dtype=dtype, device=self.device)
        # Casts on the way, so that there is no second copy of everything.
        torch._chunk_cat(parts, dim=0, num_chunks=num, out=row.view(num, -1))
        return row

    def copy_to_host(self, piece: torch.Tensor) -> torch.Tensor:
        """All parameters at once, if they are of one dtype. Without pinned memory there is no copy but to wait for."""
        dtypes = {entry.piece.dtype for entry in self._entries}
        if len(dtypes) > 1 or not self._pins:
            return piece
        # Cast first, for the CPU cannot cast what is not there yet; PyTorch pins what such a copy goes to.
        return piece.to(dtypes.pop()).to(self._entries[0].piece.device, non_blocking=True)

    def accept_gradient(self, gradient: Gradient, piece: torch.Tensor) -> None:
        """3. DTensors around the parts of ``piece``."""
        # What could not be sent ahead is waited for here, once for all parameters.
        piece = piece.to(self._entries[0].piece.device)
        start = 0
        for number in gradient.numbers:
            entry = self._entries[number]
            part = piece[start : start + entry.piece.numel()].view(entry.piece.shape)
            start += entry.sharding.cut.chunk_numel
            if part.dtype is not entry.piece.dtype:
                part = part.to(entry.piece.dtype)
            before = entry.parameter.grad
            if before is None:
                entry.parameter.grad = entry.sharding.wrap(part)
            else:
                piece_of(before).add_(part)
            # Autograd did not put the gradient there, so nothing else calls the hooks that wait for it.
            hooks = entry.parameter._post_accumulate_grad_hooks
            if hooks:
                for hook in list(hooks.values()):
                    hook(entry.parameter)

    # --- the user ---

    def local_parameters(self) -> list[nn.Parameter]:
        """The DTensors."""
        return [entry.parameter for entry in self._entries]


class _Arrival:
    """The promise that all rows of a unit are there, sorted by parameter."""

    __slots__ = ("_lane", "_layout", "_promises")

    def __init__(self, promises: list[Promise], layout: PerParameterLayout, lane: Lane) -> None:
        self._promises, self._layout, self._lane = promises, layout, lane

    def wait(self) -> None:
        for promise in self._promises:
            promise.wait()
        self._layout.arrive(self._lane)
