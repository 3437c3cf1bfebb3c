"""Layout 2: one DTensor for each parameter.

Every parameter keeps its name and its shape: what the optimizer owns is a ``DTensor``, which knows the whole shape and
holds this rank's rows of it. Printing, saving, clipping and filtering work on it as on any parameter.

Worked example, ``weight`` of shape (3, 2) and ``bias`` of shape (3,), two ranks::

    rank 0    weight 2 rows, bias 2 elements     sends w w w w b b
    rank 1    weight 1 row,  bias 1 element      sends w w . . b .
    gathered  w w w w b b w w . . b .            sorted by rank
    whole     w w w w w w . .   b b b .          sorted by parameter: two leaves that autograd owns

How memory lies and travels is told in ``row.py``; which parameters share a row, nearly always all of a unit, in
``rows.py``, where an *entry* has all that is known of one. Here is what the unit sees, and the way of the gradients:

1. only parameters that have a gradient take part in the reduction. Frozen ones cost nothing, unlike in a flat layout;
2. each gradient is cut like its parameter and the pieces are sorted by rank, in one operator for all of one mesh;
3. what comes back is a row of this rank's pieces, and ``.grad`` of each DTensor is a DTensor around its part of it.

Users may replace what they see: ``load_state_dict(assign=True)``, ``to_empty``, ``model.to(...)`` put other tensors in
its place. The layout looks when an iteration begins, and takes the new values into its rows, or into other rows if the
dtype is another. Not earlier: modules are converted one after the other, and in between a unit can be of two dtypes.

Trade-off against the flat layout: a copy out for each gather, a sorted copy of the gradients, and DTensors in the
optimizer; in exchange no tensor is anonymous, and frozen and trained parameters, or several dtypes, can share a unit.

*In torch:* ``FSDPParam`` and ``FSDPParamGroup``, 1830 lines.

Spec: FS2-04 to FS2-08, FS2-13, FS2-19, FS2-22, FS2-28, FS2-MP-02, FS2-MP-03, FS2-SYNC-02, FS2-META-03, NEW-23,
STREAM-05, STREAM-10.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine import lifetime
from minifsdp.engine.dtensors import Sharding, gradient_of, piece_of
from minifsdp.engine.lanes import Lanes, Promise
from minifsdp.engine.layout import Gradient, Layout, OwnedParameter, replaced_parameter_error
from minifsdp.engine.lifetime import ReleaseEvent
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.messages import message
from minifsdp.engine.row import VERSION, Options
from minifsdp.engine.rows import Rows


class PerParameterLayout(Layout):
    """The parameters of one unit, each a DTensor.

    Args:
        parameters: at least one, of any dtypes, frozen or not.
        shardings: how each is cut.
        options: where their values live, and in which dtype they are computed and reduced.

    Attributes:
        meshes: who shares; nearly always one.
    """

    def __init__(
        self, parameters: Mapping[nn.Parameter, OwnedParameter], shardings: Sequence[Sharding], options: Options
    ) -> None:
        self.meshes = list(dict.fromkeys(sharding.table for sharding in shardings))
        self.device, self.offloads, self._pins = options.device, options.offload, options.pin
        self.parameters = list(parameters.values())
        self._precision = options.precision
        self._sorted = Rows(parameters, shardings, options)
        self._entries = self._sorted.entries
        self._places = [
            (slot.module._parameters, slot, index)
            for index, owned in enumerate(self.parameters)
            for slot in owned.slots
        ]
        self._gathered_at: object = None
        self._has_copied = False
        self._resting: list[torch.Tensor] | None = None
        self._describe()
        self._show(self._sharded)

    def _describe(self) -> None:
        """What follows from the rows, and is asked for often."""
        self._rows = self._sorted.rows
        self._choose_dtype()
        self.num_bytes = sum(row.num_bytes for row in self._rows)
        self._is_borrowed = all(row.is_borrowed for row in self._rows)
        self._sharded: list[torch.Tensor] = [entry.parameter for entry in self._entries]
        self._leaves: list[torch.Tensor] = [entry.leaf for entry in self._entries]

    def _choose_dtype(self) -> None:
        """Gradients of several dtypes travel in one that holds them all."""
        trained = [entry.row.dtype for entry in self._entries if entry.parameter.requires_grad]
        self.dtype = functools.reduce(torch.promote_types, trained or [self._rows[0].dtype])

    # --- the unsharded tensors ---

    def settle(self) -> None:
        """Adapts to what was done to the parameters since, and makes sure that they have values.

        Raises:
            RuntimeError: some of them are on the meta device.
        """
        self.notice_edits()
        # A local tensor may have got, or lost, the methods that decide what is sent (`rows.special_rows`).
        self._take_over(is_edited=False)
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
        """Issues one gather for each row, nearly always one. The layout is its own promise: see `wait`."""
        self._gathered_at = self._stamp()
        if self._has_copied:
            # On the compute stream, which the lane has not followed since.
            lanes.gather.follow()
            self._has_copied = False
        with lanes.gather as lane:
            self._promises = [promise for row in self._rows for promise in row.gather(lane, self.name)]
        return self

    def wait(self) -> None:
        """Waits for all rows, and sorts what has arrived."""
        promises, self._promises = self._promises, []
        for promise in promises:
            promise.wait()
        for row in self._rows:
            row.arrive()
        for entry in self._entries:
            if entry.plain_leaf is not entry.row.leaves[entry.number]:
                # A row whose parameter decides what is sent makes its leaf when it first arrives.
                self._renew_leaves()

    def free(self) -> ReleaseEvent | None:
        """Gives the memory of all leaves back."""
        for row in self._rows:
            row.free()
        return None if self._is_borrowed else lifetime.DONE

    def rest(self, group: Group, mesh: DeviceMesh) -> None:
        """The next gather will come from what the ranks of ``group`` keep between them; `free` must follow.

        Args:
            group: a few ranks.
            mesh: over which modules show the parameters meanwhile; its last axis has the ranks of ``group``.
        """
        self._resting = self._sorted.rest(group, mesh)

    def wake(self) -> None:
        """The next gather comes from the shards again."""
        resting, self._resting = self._resting, None
        if resting is not None:
            for row in self._rows:
                row.wake()
            if self._shown is resting:
                self._show(self._sharded)

    def _stamp(self) -> object:
        # A DTensor counts what is done to it, and the row what is done to its local tensor. List operators and fused
        # kernels increase neither version, so the steps are counted, too.
        return self.steps.count, [row.stamp() for row in self._rows], list(map(VERSION, self._sharded))

    def is_stale(self) -> bool:
        """Whether a shard has changed since the last gather began. A copy that is only cast is always stale."""
        return self._gathered_at != self._stamp() or (self.gather_group is None and not self._is_borrowed)

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
                    raise replaced_parameter_error(slot, self.name)
                entry.parameter, is_edited = found, True
            elif piece_of(entry.parameter) is not entry.piece:
                is_edited = True
        if is_edited:
            self._take_over(is_edited=True)
        elif len(self._rows) > 1:
            # Parameters of another dtype may be trained from now on.
            self._choose_dtype()

    def _take_over(self, *, is_edited: bool) -> None:
        self.wake()
        self._sorted.take_over(self.name)
        # Copied into the memory of a row that was kept, or of a new one.
        self._has_copied |= is_edited or self._sorted.rows != self._rows
        self._renew_leaves()

    def _renew_leaves(self) -> None:
        for entry in self._entries:
            if entry.plain_leaf is not entry.row.leaves[entry.number]:
                entry.make_leaf()
                if entry.unreduced is not None:
                    # The model was converted, and this gradient with it.
                    entry.unreduced = entry.unreduced.to(self._precision.reduces_in(entry.leaf.dtype))
        shows_leaves = self._shown is self._leaves
        self._describe()
        self._show(self._leaves if shows_leaves else self._sharded)

    def show_unsharded(self) -> None:
        """Puts the leaves on the modules; the same ones every time."""
        self._show(self._leaves)

    def show_again(self) -> None:
        """As in forward."""
        self._show(self._leaves)

    def show_sharded(self) -> None:
        """Puts the DTensors on the modules."""
        self._show(self._sharded if self._resting is None else self._resting)

    def _show(self, tensors: list[torch.Tensor]) -> None:
        for entry in self._entries:
            # The user has frozen it since, or trains it again.
            if not entry.leaf.requires_grad is entry.parameter.requires_grad is entry.is_trained:
                entry.follow_requires_grad()
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
        both = zip(gradient.parts, gradient.numbers, strict=True)
        over = [(part, number) for part, number in both if self._entries[number].sharding.table == mesh]
        return Gradient([part for part, _ in over], [number for _, number in over])

    def keep_unreduced(self, gradient: Gradient) -> None:
        """Adds to what waits, in the dtype in which it will travel. A backward that breaks off leaves it as it was."""
        for number, part in zip(gradient.numbers, gradient.parts, strict=True):
            entry = self._entries[number]
            if entry.unreduced is None:
                entry.unreduced = part.to(self._precision.reduces_in(part.dtype))
            else:
                entry.unreduced.add_(part)

    @property
    def has_unreduced(self) -> bool:
        """Whether something waits for its reduction."""
        return any(entry.unreduced is not None for entry in self._entries)

    def pack(self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False) -> torch.Tensor:
        """2. Cut and sorted by rank; where rows are missing, zeros."""
        parts, dtypes, numel = [], set(), 0
        num = self._entries[gradient.numbers[0]].sharding.cut.num_shards
        for number, part in zip(gradient.numbers, gradient.parts, strict=True):
            cut = self._entries[number].sharding.cut
            parts.append(part if cut.dim == 0 else torch.cat(part.chunk(num, cut.dim)))
            dtypes.add(part.dtype)
            numel += cut.padded_numel
        if len(dtypes) > 1 or dtype.is_complex:
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
        # What `copy_to_host` has left is copied here, with one wait for all parameters.
        piece = piece.to(self._entries[0].piece.device)
        start = 0
        for number in gradient.numbers:
            entry = self._entries[number]
            part = piece[start : start + entry.piece.numel()].view(entry.piece.shape)
            start += entry.sharding.cut.chunk_numel
            if part.is_complex() and not entry.piece.is_complex():
                part = part.real.contiguous()
            if part.dtype is not entry.piece.dtype:
                part = part.to(entry.piece.dtype)
            before = entry.parameter.grad
            if before is None:
                entry.parameter.grad = gradient_of(entry.parameter, part)
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
