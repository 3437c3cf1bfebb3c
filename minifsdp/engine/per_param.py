"""Layout 2: one DTensor for each parameter.

Every parameter keeps its name and its shape. The optimizer's parameter is a ``DTensor`` with the unsharded shape, which
stores this rank's rows. Users can print, save, clip and filter it like any parameter.

Worked example, ``weight`` of shape (3, 2) and ``bias`` of shape (3,), two ranks::

    rank 0    weight 2 rows, bias 2 elements     sends w w w w b b
    rank 1    weight 1 row,  bias 1 element      sends w w . . b .
    buffer    w w w w b b w w . . b .            sorted by rank
    sorted    w w w w w w . .   b b b .          sorted by parameter: two leaves that autograd owns

Each parameter is a `ShardedParam` with memory in a bucket (``bucket.py``), usually the same for all parameters. The
layout issues one all-gather for each bucket. The reduction of gradients has its own memory:

1. Only parameters that have a gradient take part in the reduction. Frozen ones cost nothing, unlike in a flat layout.
2. One operator for each mesh splits each gradient like its parameter and sorts the shards by rank.
3. The result is one tensor with this rank's shards. ``.grad`` of each parameter is a DTensor around its part of it.

Users may replace the registered parameters, with ``load_state_dict(assign=True)``, ``to_empty`` or ``model.to(...)``. A
case copies the new values into the buckets, see ``minifsdp/cases/replaced_parameters.py``.

Trade-off against the flat layout: a copy-out for each all-gather, a sorted copy of the gradients, and DTensors in the
optimizer. In return, every tensor has a name, and a unit can mix frozen and trainable parameters, or several dtypes.

*In torch:* ``FSDPParam`` and ``FSDPParamGroup``, 1830 lines.

Spec: FS2-04 to FS2-08, FS2-13, FS2-19, FS2-22, FS2-28, FS2-MP-02, FS2-MP-03, FS2-SYNC-02, FS2-META-03, NEW-23,
STREAM-05, STREAM-10.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from minifsdp.engine import lifetime
from minifsdp.engine.bucket import assign_to_buckets
from minifsdp.engine.comm_streams import COMPLETED, CommStreams, Handle
from minifsdp.engine.layout import (
    Gradient,
    Layout,
    Steps,
    replaced_error,
    users_hooks,
)
from minifsdp.engine.lifetime import ReleaseEvent
from minifsdp.engine.sharded_param import (
    LEAF,
    VERSION,
    Options,
    ShardedParam,
    around,
    local_shard_of,
)

STAMP = operator.methodcaller("stamp")


class PerParameterLayout(Layout):
    """The parameters of one unit, each as a DTensor.

    Args:
        params: at least one, of any dtypes, frozen or not; also an attribute.
        options: devices and dtypes.

    Attributes:
        buckets: the memory of the parameters; nearly always one bucket.
        local_parameters: the optimizer's parameters.
        sharded_params: the tensors to register while the unit is sharded; `local_parameters`, unless a case sets them.
        assigned: the tensors that the modules have.
        has_copied: whether values were copied into a bucket since the last all-gather began.
    """

    shards_are_dtensors = True

    @lifetime.outside_inference_mode
    def __init__(self, params: Sequence[ShardedParam], options: Options) -> None:
        self.params = params
        self.options = options
        self.device = options.device
        self.precision = options.precision
        self.offloads = options.offload
        self._pins = options.pin
        self.param_infos = [param.info for param in params]
        places = [
            (info, index)
            for index, first in enumerate(self.param_infos)
            for info in first.places
        ]
        self.attributes = [
            (info.module._parameters, info, index) for info, index in places
        ]
        self._handles: list[Handle] = []
        self.steps = Steps()
        self._gathered_at: object = None
        self.has_copied = False
        self.buckets = assign_to_buckets(
            params, [param.local_shard for param in params], options, []
        )
        for param in params:
            param.replace_original()
        self.leaves: list[torch.Tensor] = []
        self.assigned: Sequence[torch.Tensor] = []
        self.use_buckets()

    def use_buckets(self) -> None:
        """Uses and registers the leaves of the buckets, and caches properties of the buckets that are used often."""
        for bucket in self.buckets:
            for param, leaf in zip(bucket.params, bucket.leaves, strict=True):
                if param.plain_leaf is not leaf:
                    param.use_leaf(
                        leaf,
                        self.precision.reduces_in(param.accumulates_in(leaf.dtype)),
                    )
        self.choose_dtype()
        self.num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        self.group = next(
            (bucket.group for bucket in self.buckets if bucket.group is not None), None
        )
        self.is_borrowed = all(bucket.is_borrowed for bucket in self.buckets)
        uses_leaves = self.assigned is self.leaves
        self.local_parameters = [param.parameter for param in self.params]
        self.sharded_params: Sequence[torch.Tensor] = self.local_parameters
        self.leaves = list(map(LEAF, self.params))
        self.register(self.leaves if uses_leaves else self.local_parameters)

    def choose_dtype(self) -> None:
        """Gradients of several dtypes are reduced in a dtype that can represent them all."""
        trained = {
            p.accumulates_in(bucket.dtype)
            for bucket in self.buckets
            for p in bucket.params
            if p.parameter.requires_grad
        }
        self.dtype = functools.reduce(
            torch.promote_types, trained or [self.buckets[0].dtype]
        )

    # --- memory ---

    def all_gather(self, comm_streams: CommStreams) -> Handle | None:
        """Issues one all-gather for each bucket. The layout itself is the handle, see `wait`."""
        self._gathered_at = self._stamp()
        if self.has_copied:
            # Copied on the compute stream; the communication stream has not waited since.
            comm_streams.all_gather.wait_compute()
            self.has_copied = False
        with comm_streams.all_gather as comm_stream:
            for bucket in self.buckets:
                for issue, output, local_shard in bucket.prepare_all_gather(
                    comm_stream
                ):
                    work = (
                        COMPLETED
                        if bucket.group is None
                        else issue(bucket.group, output, local_shard, self.name)
                    )
                    self._handles.append(comm_stream.handle(work))
        return self

    def wait(self) -> None:
        """Waits for all buckets, and runs the copy-out."""
        handles = self._handles
        self._handles = []
        for handle in handles:
            handle.wait()
        for bucket in self.buckets:
            bucket.copy_out()

    def free(self) -> ReleaseEvent | None:
        """Frees the memory of all leaves."""
        for bucket in self.buckets:
            bucket.free()
        return None if self.is_borrowed else lifetime.DONE

    def _stamp(self) -> object:
        # A DTensor counts its own in-place changes, and the bucket counts the changes of the local tensor. List
        # operators and fused kernels increase neither version, so the optimizer steps are counted as well.
        return (
            self.steps.count,
            list(map(STAMP, self.buckets)),
            list(map(VERSION, self.local_parameters)),
        )

    def is_stale(self) -> bool:
        """Whether a shard has changed since the last all-gather began. A copy that was only cast is always stale."""
        return self._gathered_at != self._stamp() or (
            self.group is None and not self.is_borrowed
        )

    # --- the attributes of modules ---

    def use_unsharded_params(self, *, is_backward: bool = False) -> None:
        """Registers the leaves on the modules. Only the bucket of a case creates a leaf after the first time.

        Raises:
            RuntimeError: if a module has another tensor, for example inside ``functional_call``.
        """
        assigned = self.assigned
        for dictionary, attribute, index in self.attributes:
            if (
                attribute.name not in dictionary
                or dictionary[attribute.name] is not assigned[index]
            ):
                raise replaced_error(self, attribute)
        self.leaves = list(map(LEAF, self.params))
        self.register(self.leaves)

    def use_kept_params(self, *, is_kept: bool) -> None:
        """Changes nothing: modules keep the leaves."""

    def use_sharded_params(self) -> None:
        """Registers the DTensors on the modules."""
        self.register(self.sharded_params)

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Registers tensors on the modules. Leaves and optimizer's parameters agree about gradients and hooks."""
        for param in self.params:
            # The user has changed `requires_grad` since then.
            is_trained = param.parameter.requires_grad
            if not param.leaf.requires_grad is is_trained is param.is_trained:
                param.toggle_requires_grad()
            if param.leaf._backward_hooks is not param.parameter._backward_hooks:
                param.share_tensor_hooks()
        self.assigned = tensors
        for dictionary, attribute, index in self.attributes:
            dictionary[attribute.name] = tensors[index]  # type: ignore[assignment]
            if attribute.second_places:
                attribute.update_second_places(tensors[index])

    # --- gradients ---

    def take_gradient(self, *, with_unreduced: bool) -> Gradient | None:
        """1. Takes the gradients of the parameters that have one."""
        taken = Gradient([], [])
        for number, param in enumerate(self.params):
            grad = param.leaf.grad
            param.leaf.grad = None
            # The gradient is a DTensor only with tensor parallelism.
            part = (
                grad
                if grad is None or param.leaf is param.plain_leaf
                else param.local_gradient(grad)
            )
            if with_unreduced and param.unreduced is not None:
                part = param.unreduced if part is None else param.unreduced.add_(part)
                param.unreduced = None
            if (
                part is None
                and self.reduces_unused
                and with_unreduced
                and param.parameter.requires_grad
            ):
                part = torch.zeros(
                    param.shape, dtype=param.leaf.dtype, device=self.device
                )
            if part is not None and 0 not in part.shape:
                taken.indices.append(number)
                taken.parts.append(part)
            elif part is not None:
                # A parameter without elements has nothing to reduce, but the optimizer needs a gradient.
                param.parameter.grad = torch.zeros_like(
                    param.parameter, dtype=param.parameter.grad_dtype
                )
        return taken if taken.parts else None

    def keep_unreduced(self, gradient: Gradient) -> None:
        """Accumulates in the reduce dtype."""
        for number, part in zip(gradient.indices, gradient.parts, strict=True):
            param = self.params[number]
            if param.unreduced is None:
                param.unreduced = part.to(
                    self.precision.reduces_in(param.accumulates_in(part.dtype))
                )
            else:
                param.unreduced.add_(part)

    @property
    def has_unreduced(self) -> bool:
        """Whether there are unreduced gradients."""
        return any(param.unreduced is not None for param in self.params)

    def pack(
        self, gradient: Gradient, dtype: torch.dtype, *, is_written: bool = False
    ) -> torch.Tensor:
        """2. Splits the gradients and sorts the shards by rank, with zeros as padding."""
        parts = []
        # The operator below cannot cast to complex numbers, and needs parts of one dtype.
        needs_cast = dtype.is_complex
        chunk_numel = 0
        num = self.params[gradient.indices[0]].num_shards
        for number, part in zip(gradient.indices, gradient.parts, strict=True):
            param = self.params[number]
            parts.append(
                part if param.dim == 0 else torch.cat(part.chunk(num, param.dim))
            )
            needs_cast |= part.dtype is not gradient.parts[0].dtype
            chunk_numel += param.chunk_numel
        if needs_cast:
            parts = [part.to(dtype) for part in parts]
        packed = torch.empty(num * chunk_numel, dtype=dtype, device=self.device)
        # This operator casts during the copy, so there is no second copy of all gradients.
        torch._chunk_cat(parts, dim=0, num_chunks=num, out=packed.view(num, -1))
        return packed

    def copy_to_host(self, local_shard: torch.Tensor) -> torch.Tensor:
        """Copies all shards at once if they have one dtype. Without pinned memory, every copy blocks."""
        dtypes = {param.parameter.grad_dtype for param in self.params}
        if len(dtypes) > 1 or None in dtypes or not self._pins:
            return local_shard
        # Cast first: the CPU cannot cast values that have not arrived. PyTorch pins the destination of this copy.
        return local_shard.to(dtypes.pop()).to(
            self.params[0].local_shard.device, non_blocking=True
        )

    def accept_gradient(self, gradient: Gradient, local_shard: torch.Tensor) -> None:
        """3. Adds DTensors around the parts of ``local_shard`` to ``.grad``."""
        # If `copy_to_host` did not copy, copy here, with one wait for all parameters.
        local_shard = local_shard.to(self.params[0].local_shard.device)
        sizes = [self.params[number].chunk_numel for number in gradient.indices]
        for number, part in zip(
            gradient.indices, local_shard.split_with_sizes(sizes), strict=True
        ):
            param = self.params[number]
            numel = param.local_shard.numel()
            if numel < param.chunk_numel:
                part = part[:numel]
            if part.shape != param.local_shard.shape:
                part = part.view(param.local_shard.shape)
            dtype = param.parameter.grad_dtype or part.dtype
            if part.dtype is not dtype:
                if part.is_complex() and not dtype.is_complex:
                    part = part.real.contiguous()
                part = part.to(dtype)
            before = param.parameter.grad
            if before is None:
                # Reuse the spec object: optimizer operators compare both specs, which is fast for one object.
                spec: Any = param.parameter._spec  # type: ignore[attr-defined]
                param.parameter.grad = (
                    DTensor(part, spec, requires_grad=False)
                    if dtype is param.local_shard.dtype
                    else around(part, spec)
                )
            else:
                local_shard_of(before).add_(part)
            # Autograd did not set this gradient, so the post-accumulate-grad hooks must be called here.
            hooks = param.parameter._post_accumulate_grad_hooks
            for _, hook in users_hooks(hooks) if hooks else ():
                hook(param.parameter)
