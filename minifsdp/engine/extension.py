"""Custom all-gathers: the ``fsdp_pre_all_gather`` extension for tensor subclasses.

A weight can be stored in 32 bits and sent in 8 bits. If a local tensor has the two methods of the extension, the
all-gather calls them. The first returns the tensors to send. The second builds the unsharded parameter from the tensors
of all ranks::

    shard (float32, class Int8)  --- fsdp_pre_all_gather --->   steps (int8), scale (float32)
                                                                     | all-gather each
    leaf (bfloat16)              <-- fsdp_post_all_gather ---   steps and scales of all ranks

Each such parameter has its own bucket, with the methods of `Bucket`:

1. The shard is padded before the first call, so all ranks send the same number of bytes for every class.
2. The first call of the second method creates a tensor, which becomes the leaf. Later calls write into it (``out=``).
3. The all-gather outputs, and the inner tensors that the second method returns, have memory from all-gather to reshard.
   The bucket keeps the metadata that the first method returns until the compute stream has read it. If the optional
   method ``fsdp_should_release_all_gather_outputs_after_post_all_gather`` returns True, the outputs are released when
   the second method has returned.
4. A tensor of any class can get the two methods after sharding: ``p.to_local().fsdp_pre_all_gather = ...``. These
   methods refer to this tensor object. So the bucket pads and moves the tensors that the first method returns, but not
   the object itself.

*In torch:* branches in ``FSDPParam`` and ``foreach_all_gather``.

Spec: FS2-EXT-01 to FS2-EXT-06, STREAM-04.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from minifsdp.engine import lifetime
from minifsdp.engine.comm_streams import CommStream, compute_event
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.sharded_param import Options, ShardedParam
from minifsdp.engine.shards import shard_shape

BEFORE, AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class ExtendedBucket:
    """The bucket of one parameter whose class has the two methods; see `Bucket` for its methods and attributes.

    Args:
        param: the parameter.
        local_shard: this rank's local shard.
        options: compute device and dtype.
    """

    sends_each = False
    kind: object = None

    def __init__(self, param: ShardedParam, local_shard: torch.Tensor, options: Options) -> None:
        self.is_borrowed, self.group, self._num_shards = False, param.mesh_groups.shard, param.mesh_groups.num_shards
        self.params, self._shape, self._dim = [param], param.shape, param.dim
        self._padded_shape = shard_shape(self._shape, self._dim, self._num_shards, 0)
        self.device, self.dtype = options.device, options.precision.computes_in(local_shard.dtype)
        self.num_bytes = self._num_shards * self._padded_shape.numel() * self.dtype.itemsize
        self._storage_device = options.storage_device(local_shard)
        self._pad(local_shard)
        # A placeholder of the same shape, without memory, until the first all-gather creates the leaf.
        self.leaves = [nn.Parameter(torch.empty(self._shape, dtype=self.dtype, device="meta"), requires_grad=False)]
        self._stride = self.leaves[0].stride()
        # The arguments of the first method.
        self._arguments = [param.shard_axis, self._shape, self._stride, param.info.module, options.policy]
        self._freed_at: Any = None
        self._metadata: Any = None
        self._outputs: list[torch.Tensor] = []
        self._inner: list[tuple[torch.Tensor, int]] = []

    def copy_in(self, local_shards: Sequence[torch.Tensor]) -> None:
        """Replaces the local shard by another one of the same dtype and device."""
        if local_shards[0] is not self.local_shards[0]:
            self._pad(local_shards[0])

    def _pad(self, part: torch.Tensor) -> None:
        self._is_patched = BEFORE in vars(part)
        if self._is_patched:
            # 4. The same tensor object, with its own memory.
            part.data = part.clone()
            self._padded, self.local_shards = part, [part]
        else:
            # 1. A tensor of the parameter's class, with its own memory. Some classes have no slices.
            self._padded = own = part.new_zeros(self._padded_shape).to(self._storage_device)
            self.local_shards = [own if own.shape == part.shape else own.narrow(self._dim, 0, part.shape[self._dim])]
            self.local_shards[0].copy_(part)

    def stamp(self) -> object:
        """Never equal to an earlier stamp, because a change inside a tensor subclass cannot be detected."""
        return object()

    @lifetime.outside_inference_mode
    def prepare_all_gather(self, comm_stream: CommStream) -> list[tuple[Any, Any]]:
        """Calls the first method. Returns an output and an input of an all-gather for each tensor that it returns."""
        if self._freed_at is not None:
            # The communication stream created the metadata, and the compute stream has read it up to this event.
            comm_stream.wait_compute(self._freed_at)
        shard = self._padded if self._is_patched else self._padded.to(self.device, non_blocking=True)
        tensors, self._metadata = self._call_before(shard)
        inputs = [self._fill_up(tensor).to(self.device).contiguous() for tensor in tensors]
        if not self._outputs:
            self._outputs = [t.new_empty((self._num_shards * t.shape[0], *t.shape[1:])) for t in inputs]
        for tensor, output in zip(inputs, self._outputs, strict=True):
            output.untyped_storage().resize_(output.nbytes)
            if self.group is None:
                output.copy_(tensor)
        return [(output.view(-1), tensor.view(-1)) for output, tensor in zip(self._outputs, inputs, strict=True)]

    def _call_before(self, shard: Any) -> Any:
        before = getattr(shard, BEFORE)
        # In earlier versions of torch, the mesh is the only argument.
        has_only_mesh = len(inspect.signature(before).parameters) == 1
        return before(*(self._arguments[:1] if has_only_mesh else self._arguments))

    def _fill_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """4. Pads a tensor that was computed from an unpadded shard."""
        if not self._is_patched or tensor.shape != self._padded.shape or tensor.shape == self._padded_shape:
            return tensor
        padded = tensor.new_zeros(self._padded_shape)
        padded.narrow(self._dim, 0, tensor.shape[self._dim]).copy_(tensor)
        return padded

    @lifetime.outside_inference_mode
    def copy_out(self) -> bool:
        """2. Creates the leaf, or fills it."""
        for tensor, num_bytes in self._inner:
            tensor.untyped_storage().resize_(num_bytes)
        after: Any = getattr(self._padded, AFTER)
        is_first = self.leaves[0].is_meta
        if is_first:
            self._create_leaf(*after(tuple(self._outputs), self._metadata, self.dtype))
        else:
            after(tuple(self._outputs), self._metadata, self.dtype, out=self.leaves[0])
            self.params[0].version = self.leaves[0]._version
        if getattr(self._padded, RELEASES, bool)():
            for output in self._outputs:
                lifetime.release(output)
        return is_first

    def _create_leaf(self, tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        self._inner = [(one, one.untyped_storage().size()) for one in inner]
        if tensor.ndim != len(self._shape):
            tensor = tensor.as_strided(self._shape, self._stride, 0)
        elif tensor.shape != self._shape:
            # Drops the padding, for any strides. Without padding, the module computes with the tensor as it is.
            tensor = tensor.narrow(self._dim, 0, self._shape[self._dim])
        # `.data` has its own version counter: a later all-gather must not look like an in-place change.
        self.leaves = [nn.Parameter(tensor.data, requires_grad=False)]

    def free(self) -> None:
        """3. Releases the memory of the all-gather outputs and of the inner tensors."""
        for tensor in [*self._outputs, *(one for one, _ in self._inner)]:
            if tensor.untyped_storage().size():
                lifetime.release(tensor)
        self._freed_at = compute_event(self.device)

    def reshard_to_smaller_mesh(self, group: Group) -> NoReturn:
        """Not supported: an unsharded parameter of such a class cannot be sharded again."""
        raise NotImplementedError(message("extension-in-parts", method=BEFORE))

    def unshard_from_full_mesh(self) -> None:
        """Does nothing: the bucket is always sharded over the full mesh."""


def is_extended(local_shard: torch.Tensor, path: str) -> bool:
    """Whether the local tensor of the parameter ``path`` has the two methods of a custom all-gather.

    Raises:
        AssertionError: if the tensor has only one of the two methods, or only the optional third one.
    """
    has = [name for name in (BEFORE, AFTER, RELEASES) if hasattr(local_shard, name)]
    if has and has[:2] != [BEFORE, AFTER]:
        kind = type(local_shard).__name__
        missing = AFTER if BEFORE in has else BEFORE
        raise AssertionError(message("half-extension", path=path, type=kind, method=has[0], missing=missing))
    return bool(has)
