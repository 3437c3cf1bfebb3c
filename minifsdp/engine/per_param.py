"""Layout 2: one DTensor for each parameter.

Every parameter keeps its name and its shape. The optimizer's parameter is a ``DTensor`` with the unsharded shape, which
stores this rank's rows. Printing, saving, clipping and filtering work as for any parameter.

Worked example, ``weight`` of shape (3, 2) and ``bias`` of shape (3,), two ranks::

    rank 0    weight 2 rows, bias 2 elements     sends w w w w b b
    rank 1    weight 1 row,  bias 1 element      sends w w . . b .
    gathered  w w w w b b w w . . b .            sorted by rank
    whole     w w w w w w . .   b b b .          sorted by parameter: two leaves that autograd owns

``row.py`` describes the memory and the communication of a bucket. ``rows.py`` assigns parameters to buckets, nearly
always one for each unit, and has an `Entry` for each parameter. This module has the unit's interface and reductions:

1. Only parameters that have a gradient take part in the reduction. Frozen ones cost nothing, unlike in a flat layout.
2. Each gradient is split like its parameter and the shards are sorted by rank, in one operator for each mesh.
3. The result is a bucket of this rank's shards. ``.grad`` of each DTensor is a DTensor around its part of the bucket.

Users may replace the registered parameters, with ``load_state_dict(assign=True)``, ``to_empty`` or ``model.to(...)``.
The layout checks this when an iteration begins, and copies the new values into its buckets, or into new ones if the
dtype has changed. Not earlier: modules are converted one after the other, and meanwhile a unit can have two dtypes.

Trade-off against the flat layout: a copy-out for each all-gather, a sorted copy of the gradients, and DTensors in the
optimizer. In exchange, every tensor has a name, and a unit can mix frozen and trainable parameters, or several dtypes.

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
from minifsdp.engine.comm_streams import CommStreams, Handle
from minifsdp.engine.dtensors import Sharding, gradient_of, local_shard_of
from minifsdp.engine.layout import Gradient, Layout, OwnedParameter, replaced_parameter_error
from minifsdp.engine.lifetime import ReleaseEvent
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.messages import message
from minifsdp.engine.row import VERSION, Options
from minifsdp.engine.rows import Rows


class PerParameterLayout(Layout):
    """The parameters of one unit, each a DTensor.

    Args:
        parameters: at least one, of any dtypes, frozen or not.
        shardings: how each is sharded.
        options: devices and dtypes.

    Attributes:
        meshes: the meshes over which parameters are sharded; nearly always one.
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
        """Caches properties of the buckets that are used often."""
        self._rows = self._sorted.rows
        self._choose_dtype()
        self.num_bytes = sum(row.num_bytes for row in self._rows)
        self._is_borrowed = all(row.is_borrowed for row in self._rows)
        self._sharded: list[torch.Tensor] = [entry.parameter for entry in self._entries]
        self._leaves: list[torch.Tensor] = [entry.leaf for entry in self._entries]

    def _choose_dtype(self) -> None:
        """Gradients of several dtypes are reduced in a dtype that can represent them all."""
        trained = [entry.row.dtype for entry in self._entries if entry.parameter.requires_grad]
        self.dtype = functools.reduce(torch.promote_types, trained or [self._rows[0].dtype])

    # --- the unsharded tensors ---

    def refresh_from_module(self) -> None:
        """Adapts to changes of the parameters, and checks that they have values.

        Raises:
            RuntimeError: some of them are on the meta device.
        """
        self.accept_replacements()
        # A local tensor may have gained or lost the methods of a custom all-gather (`rows.special_rows`).
        self._take_over(is_edited=False)
        without = [
            self.full_name(entry.owned.path) for entry in self._entries if entry.local_shard.device.type == "meta"
        ]
        if without:
            raise RuntimeError(message("still-meta", without=without))

    @property
    def is_trained(self) -> bool:
        """Whether a backward will produce a gradient."""
        return any(entry.parameter.requires_grad for entry in self._entries)

    # --- memory ---

    @property
    def all_gather_group(self) -> Group | None:
        """The ranks of the next all-gather."""
        return next((row.group for row in self._rows if row.group is not None), None)

    def all_gather(self, comm_streams: CommStreams) -> Handle | None:
        """Issues one all-gather for each bucket, nearly always one. The layout itself is the handle: see `wait`."""
        self._gathered_at = self._stamp()
        if self._has_copied:
            # Copied on the compute stream; the communication stream has not waited since.
            comm_streams.all_gather.wait_compute()
            self._has_copied = False
        with comm_streams.all_gather as comm_stream:
            self._handles = [handle for row in self._rows for handle in row.all_gather(comm_stream, self.name)]
        return self

    def wait(self) -> None:
        """Waits for all buckets, and runs the copy-out."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        for row in self._rows:
            row.arrive()
        for entry in self._entries:
            if entry.plain_leaf is not entry.row.leaves[entry.number]:
                # A bucket with a custom all-gather creates its leaf after the first all-gather.
                self._renew_leaves()

    def free(self) -> ReleaseEvent | None:
        """Frees the memory of all leaves."""
        for row in self._rows:
            row.free()
        return None if self._is_borrowed else lifetime.DONE

    def rest(self, group: Group, mesh: DeviceMesh) -> None:
        """Reshards to a smaller mesh: the next all-gather uses only the ranks of ``group``. Call `free` afterwards.

        Args:
            group: the ranks of the smaller mesh.
            mesh: the mesh of the DTensors registered meanwhile; its last axis has the ranks of ``group``.
        """
        self._resting = self._sorted.rest(group, mesh)

    def wake(self) -> None:
        """The next all-gather reads the optimizer's shards again."""
        post_forward_mesh, self._resting = self._resting, None
        if post_forward_mesh is not None:
            for row in self._rows:
                row.wake()
            if self._shown is post_forward_mesh:
                self._show(self._sharded)

    def _stamp(self) -> object:
        # A DTensor counts its own in-place changes, and the bucket those of the local tensor. List operators and fused
        # kernels increase neither version, so the optimizer steps are counted as well.
        return self.steps.count, [row.stamp() for row in self._rows], list(map(VERSION, self._sharded))

    def is_stale(self) -> bool:
        """Whether a shard has changed since the last all-gather began. A copy that is only cast is always stale."""
        return self._gathered_at != self._stamp() or (self.all_gather_group is None and not self._is_borrowed)

    # --- what modules see ---

    def accept_replacements(self) -> None:
        """Accepts tensors that the user has registered instead of the unit's, and values in other memory.

        Raises:
            RuntimeError: the new value is not a parameter of this shape and placement.
        """
        is_edited = False
        for dictionary, slot, index in self._places:
            found, entry = dictionary.get(slot.name), self._entries[index]
            if found is not self._shown[index]:
                if not isinstance(found, nn.Parameter) or not entry.sharding.fits(found):
                    raise replaced_parameter_error(slot, self.name)
                entry.parameter, is_edited = found, True
            elif local_shard_of(entry.parameter) is not entry.local_shard:
                is_edited = True
        if is_edited:
            self._take_over(is_edited=True)
        elif len(self._rows) > 1:
            # Other parameters, of another dtype, may have become trainable.
            self._choose_dtype()

    def _take_over(self, *, is_edited: bool) -> None:
        self.wake()
        self._sorted.take_over(self.name)
        # The values were copied into the memory of an existing bucket, or of a new one.
        self._has_copied |= is_edited or self._sorted.rows != self._rows
        self._renew_leaves()

    def _renew_leaves(self) -> None:
        for entry in self._entries:
            if entry.plain_leaf is not entry.row.leaves[entry.number]:
                entry.make_leaf()
                if entry.unreduced is not None:
                    # The model was converted, so this gradient is converted as well.
                    entry.unreduced = entry.unreduced.to(self._precision.reduces_in(entry.leaf.dtype))
        shows_leaves = self._shown is self._leaves
        self._describe()
        self._show(self._leaves if shows_leaves else self._sharded)

    def use_unsharded_params(self) -> None:
        """Registers the leaves on the modules; they are the same tensors every time."""
        self._show(self._leaves)

    def use_unsharded_params_again(self) -> None:
        """Registers the leaves, as in forward."""
        self._show(self._leaves)

    def use_sharded_params(self) -> None:
        """Registers the DTensors on the modules."""
        self._show(self._sharded if self._resting is None else self._resting)

    def _show(self, tensors: list[torch.Tensor]) -> None:
        for entry in self._entries:
            # The user has changed `requires_grad` since.
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
        """Whether autograd has accumulated a gradient that was not taken yet."""
        return any(entry.leaf.grad is not None for entry in self._entries)

    def take_gradient(self, *, with_unreduced: bool) -> Gradient | None:
        """1. The gradients of the parameters that have one."""
        taken = Gradient([], [])
        for number, entry in enumerate(self._entries):
            grad, entry.leaf.grad = entry.leaf.grad, None
            # Only with tensor parallelism is the gradient a DTensor.
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

    def part_over(self, mesh: MeshGroups, gradient: Gradient) -> Gradient:
        """The gradients of the parameters that are sharded over ``mesh``."""
        both = zip(gradient.parts, gradient.numbers, strict=True)
        over = [(part, number) for part, number in both if self._entries[number].sharding.table == mesh]
        return Gradient([part for part, _ in over], [number for _, number in over])

    def keep_unreduced(self, gradient: Gradient) -> None:
        """Accumulates in the reduce dtype. A backward that fails does not change the accumulated gradients."""
        for number, part in zip(gradient.numbers, gradient.parts, strict=True):
            entry = self._entries[number]
            if entry.unreduced is None:
                entry.unreduced = part.to(self._precision.reduces_in(part.dtype))
            else:
                entry.unreduced.add_(part)

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients are waiting for their reduction."""
        return any(entry.unreduced is not None for entry in self._entries)

    def pack(self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False) -> torch.Tensor:
        """2. Split and sorted by rank, with zeros as padding."""
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
        # Casts during the copy, so that there is no second copy of all gradients.
        torch._chunk_cat(parts, dim=0, num_chunks=num, out=row.view(num, -1))
        return row

    def copy_to_host(self, local_shard: torch.Tensor) -> torch.Tensor:
        """Copies all parameters at once, if they have one dtype. Without pinned memory, every copy blocks."""
        dtypes = {entry.local_shard.dtype for entry in self._entries}
        if len(dtypes) > 1 or not self._pins:
            return local_shard
        # Cast first: the CPU cannot cast values that have not arrived. PyTorch pins the destination of such a copy.
        return local_shard.to(dtypes.pop()).to(self._entries[0].local_shard.device, non_blocking=True)

    def accept_gradient(self, gradient: Gradient, local_shard: torch.Tensor) -> None:
        """3. DTensors around the parts of ``local_shard``."""
        # If `copy_to_host` did not copy, copy here, with one wait for all parameters.
        local_shard = local_shard.to(self._entries[0].local_shard.device)
        start = 0
        for number in gradient.numbers:
            entry = self._entries[number]
            part = local_shard[start : start + entry.local_shard.numel()].view(entry.local_shard.shape)
            start += entry.sharding.cut.chunk_numel
            if part.is_complex() and not entry.local_shard.is_complex():
                part = part.real.contiguous()
            if part.dtype is not entry.local_shard.dtype:
                part = part.to(entry.local_shard.dtype)
            before = entry.parameter.grad
            if before is None:
                entry.parameter.grad = gradient_of(entry.parameter, part)
            else:
                local_shard_of(before).add_(part)
            # Autograd did not set this gradient, so the post-accumulate-grad hooks must be called here.
            hooks = entry.parameter._post_accumulate_grad_hooks
            if hooks:
                for hook in list(hooks.values()):
                    hook(entry.parameter)

    # --- the user ---

    def local_parameters(self) -> list[nn.Parameter]:
        """The DTensors."""
        return [entry.parameter for entry in self._entries]
