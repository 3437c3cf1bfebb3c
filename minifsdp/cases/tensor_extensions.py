"""Tensor subclasses with their own all-gather: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

A weight can be stored in 32 bits and sent in 8 bits. The class of its local tensor has two methods. The first returns
the tensors to send. The second builds the unsharded parameter from the tensors of all ranks::

    class Int8(Wrapper):  # a tensor subclass around `inner`
        def fsdp_pre_all_gather(self, mesh, size, stride, module, mp_policy):
            scale = self.inner.abs().max().reshape(1) / 127
            return ((self.inner / scale).round().to(torch.int8), scale), None

        def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
            whole = torch.cat([n.to(dtype) * s for n, s in zip(gathered[0].chunk(2), gathered[1])])
            with torch.no_grad():
                return (whole, (whole,)) if out is None else out.copy_(whole)

    layer.weight = nn.Parameter(Int8(layer.weight.detach()))
    fully_shard(layer)

Without this case, the 32-bit values are copied into an ordinary bucket and sent. The methods are never called, the
shard is a plain tensor, and there is no error.

The case is a type of bucket. `TensorExtensions` takes such a parameter, and `ExtendedBucket` stores it. It has the
methods and attributes of `Bucket`::

    shard (float32, class Int8)  --- fsdp_pre_all_gather --->   numbers (int8), scale (float32)
                                                                     | all-gather each
    leaf (bfloat16)              <-- fsdp_post_all_gather ---   numbers and scales of all ranks

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

Spec: FS2-EXT-01 to FS2-EXT-07, STREAM-04.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine import collectives, lifetime
from minifsdp.engine.comm_streams import CommStream, compute_event
from minifsdp.engine.messages import message
from minifsdp.engine.sharded_param import Options, ShardedParam
from minifsdp.engine.shards import shard_shape

BEFORE = "fsdp_pre_all_gather"
AFTER = "fsdp_post_all_gather"
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class TensorExtensions:
    """Which parameters have the methods, and their buckets; see note 6 of ``engine/bucket.py``.

    Args:
        policy: the mixed-precision policy of the unit, an argument of the first method.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def takes(self, param: ShardedParam, local_shard: torch.Tensor) -> bool:
        """Whether the local tensor of the parameter has the two methods.

        Raises:
            AssertionError: if the tensor has only one of the two methods, or only the optional third one.
        """
        has = [name for name in (BEFORE, AFTER, RELEASES) if hasattr(local_shard, name)]
        if has and has[:2] != [BEFORE, AFTER]:
            raise AssertionError(
                message(
                    "half-extension",
                    path=param.info.path,
                    type=type(local_shard).__name__,
                    method=has[0],
                    missing=AFTER if BEFORE in has else BEFORE,
                )
            )
        return bool(has)

    def place(self, param: ShardedParam) -> object:
        """Each parameter has a bucket of its own."""
        return param

    def create(
        self,
        params: list[ShardedParam],
        local_shards: Sequence[torch.Tensor],
        options: Options,
    ) -> Any:
        """Creates the bucket of one parameter."""
        return ExtendedBucket(params[0], local_shards[0], options, self._policy)


class ExtendedBucket:
    """The bucket of one parameter whose class has the two methods; see `Bucket` for its methods and attributes.

    Args:
        param: the parameter.
        local_shard: this rank's local shard.
        options: compute device and dtype.
        policy: the mixed-precision policy, an argument of the first method.
    """

    is_borrowed = False
    kind: object = None

    def __init__(
        self,
        param: ShardedParam,
        local_shard: torch.Tensor,
        options: Options,
        policy: Any = None,
    ) -> None:
        self.params = [param]
        self.group = param.mesh_groups.shard
        self._param = param
        self._options = options
        self._padded_shape = shard_shape(param.shape, param.dim, param.num_shards, 0)
        self.dtype = options.precision.computes_in(local_shard.dtype)
        self.num_bytes = (
            param.num_shards * self._padded_shape.numel() * self.dtype.itemsize
        )
        self._pad(local_shard)
        # A placeholder of the same shape, without memory, until the first all-gather creates the leaf.
        self.leaves = [
            nn.Parameter(
                torch.empty(param.shape, dtype=self.dtype, device="meta"),
                requires_grad=False,
            )
        ]
        self._stride = self.leaves[0].stride()
        # The arguments of the first method.
        self._arguments = [
            _shard_axis(param.mesh),
            param.shape,
            self._stride,
            param.info.module,
            policy,
        ]
        self._freed_at: Any = None
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
            self._padded = part
            self.local_shards = [part]
        else:
            # 1. A tensor of the parameter's class, with its own memory. Some classes have no slices.
            self._padded = part.new_zeros(self._padded_shape).to(
                self._options.storage_device(part)
            )
            own = self._rows(self._padded, part.shape)
            own.copy_(part)
            self.local_shards = [own]

    def stamp(self) -> object:
        """Never equal to an earlier stamp, because a change inside a tensor subclass cannot be detected."""
        return object()

    @lifetime.outside_inference_mode
    def prepare_all_gather(self, comm_stream: CommStream) -> list[tuple[Any, Any, Any]]:
        """Calls the first method. Returns a function, an output and an input for each tensor that it returns."""
        if self._freed_at is not None:
            # The communication stream created the metadata, and the compute stream has read it up to this event.
            comm_stream.wait_compute(self._freed_at)
        shard = (
            self._padded
            if self._is_patched
            else self._padded.to(self._options.device, non_blocking=True)
        )
        before = getattr(shard, BEFORE)
        # In earlier versions of torch, the mesh is the only argument.
        arguments = self._arguments[: len(inspect.signature(before).parameters)]
        tensors, self._metadata = before(*arguments)
        inputs = [
            self._fill_up(tensor).to(self._options.device).contiguous()
            for tensor in tensors
        ]
        if not self._outputs:
            self._outputs = [
                t.new_empty((self._param.num_shards * t.shape[0], *t.shape[1:]))
                for t in inputs
            ]
        for tensor, output in zip(inputs, self._outputs, strict=True):
            output.untyped_storage().resize_(output.nbytes)
            if self.group is None:
                output.copy_(tensor)
        return [
            (collectives.all_gather, output.view(-1), tensor.view(-1))
            for output, tensor in zip(self._outputs, inputs, strict=True)
        ]

    def _fill_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """4. Pads a tensor that was computed from an unpadded shard."""
        if tensor.shape != self._padded.shape or tensor.shape == self._padded_shape:
            return tensor
        padded = tensor.new_zeros(self._padded_shape)
        self._rows(padded, tensor.shape).copy_(tensor)
        return padded

    def _rows(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The part of a padded tensor that has ``shape``. Without padding, the tensor itself."""
        if tensor.shape == shape:
            return tensor
        return tensor.narrow(self._param.dim, 0, shape[self._param.dim])

    @lifetime.outside_inference_mode
    def copy_out(self) -> None:
        """2. Creates the leaf, or fills it."""
        for tensor, num_bytes in self._inner:
            tensor.untyped_storage().resize_(num_bytes)
        after: Any = getattr(self._padded, AFTER)
        arguments = (tuple(self._outputs), self._metadata, self.dtype)
        if self.leaves[0].is_meta:
            self._create_leaf(*after(*arguments))
        else:
            after(*arguments, out=self.leaves[0])
            self._param.version = self.leaves[0]._version
        if getattr(self._padded, RELEASES, bool)():
            for output in self._outputs:
                lifetime.release(output)

    def _create_leaf(self, tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        self._inner = [(one, one.untyped_storage().size()) for one in inner]
        if tensor.ndim != len(self._param.shape):
            tensor = tensor.as_strided(self._param.shape, self._stride, 0)
        else:
            # Drops the padding, for any strides.
            tensor = self._rows(tensor, self._param.shape)
        # `.data` has its own version counter: a later all-gather must not look like an in-place change.
        self.leaves = [nn.Parameter(tensor.data, requires_grad=False)]
        self._param.use_leaf(
            self.leaves[0], self._options.precision.reduces_in(tensor.dtype)
        )

    def free(self) -> None:
        """3. Releases the memory of the all-gather outputs and of the inner tensors."""
        for tensor in [*self._outputs, *(one for one, _ in self._inner)]:
            if tensor.untyped_storage().size():
                lifetime.release(tensor)
        self._freed_at = compute_event(self._options.device)

    @property
    def spaces(self) -> NoReturn:
        """Not supported: an unsharded parameter of such a class cannot be sharded again."""
        raise NotImplementedError(message("extension-in-parts", method=BEFORE))

    def gather_from(self, source: None) -> None:
        """Changes nothing: the bucket always gathers from the shards that the optimizer updates."""


def _shard_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The shard group as a 1-D mesh."""
    if mesh.ndim > 1 and mesh.mesh_dim_names:
        return mesh[mesh.mesh_dim_names[-1]]
    return (
        mesh
        if mesh.ndim == 1
        else DeviceMesh.from_group(mesh.get_group(1), mesh.device_type)
    )
