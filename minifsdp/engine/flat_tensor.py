"""A flat tensor: how it is sharded, and the memory of the unsharded tensor. This module does not communicate.

The parameters of a unit are concatenated into a flat tensor, which is split into equal shards, one for each rank. Equal
sizes let one all-gather rebuild the tensor without a table of sizes.

Worked example, ``a`` with 3 elements and ``b`` with 4, two ranks::

    flat       a a a b b b b
    padded     a a a b b b b .      8, the next multiple of 2
    shard 0    a a a b              all of a, one element of b
    shard 1            b b b .      the rest of b, and padding

``b`` is split between the ranks. Splitting only at parameter boundaries would give one rank 3 elements and the other 4.
With one large embedding, a single rank would store most of the model.

Cost: at most ``num_shards - 1`` elements of padding in each unit. That is negligible for a million parameters on 8
ranks. In a unit of 5 parameters it can be more than half, which is one reason not to wrap very small modules.

Each parameter keeps its memory format: its elements are concatenated in the order in which its memory has them. In the
flat tensor, a ``channels_last`` weight of shape (8, 3, 5, 5) is an (8, 5, 5, 3) tensor, and its view is a permutation
of that. A parameter whose memory has gaps or overlaps becomes contiguous.

A parameter may already be a ``DTensor`` if tensor parallelism has sharded it. Then the flat tensor contains its local
tensor, and modules have a DTensor again while the unit is unsharded.

Autograd refers to the unsharded tensor, so it is created once and lives as long as its unit. Only its memory is
allocated and freed:

1. Its storage is *resized* between full size and 0 bytes, never replaced. The tensors that autograd saves in forward
   are views of this storage, and backward needs the values under the same views.
2. An all-gather writes through an *alias*: the same storage with another version counter. To autograd the values do not
   change between forward and backward, which is correct. After a direct write, the tensor would look modified, and
   backward would raise an error.

Worked example, 4 float32 elements::

    created      sizes (4,), storage  0 bytes
    allocate     sizes (4,), storage 16 bytes, values undefined until the all-gather is done
    release      sizes (4,), storage  0 bytes; views keep their sizes, too, and must not be read

*In torch:* the same sharding in ``_get_shard`` of ``_flat_param.py``. With original parameters, torch also pads
*between* parameters for alignment. minifsdp omits this, because every offset would then depend on the dtype, and no
requirement needs it. The unsharded tensor is ``_full_param_padded``, ``_mp_shard`` or
``_full_prec_full_param_padded``.

Spec: SHARD-02, SHARD-03, SHARD-09, SHARD-13, ORIG-03, MP-02, MP-03, NEW-01.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as dtensor_spec

from minifsdp.engine.messages import message
from minifsdp.engine.shards import local_tensor


def distributed_tensor(
    view: torch.Tensor, spec: dtensor_spec.DTensorSpec | None
) -> torch.Tensor:
    """The ``DTensor`` of a view, for tensor parallelism, or the view itself; differentiable."""
    if spec is None:
        return view
    return DTensor.from_local(
        view,
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )


def local_values(
    value: torch.Tensor, spec: dtensor_spec.DTensorSpec | None, local_shape: torch.Size
) -> torch.Tensor:
    """The local values of an unsharded or distributed ``value`` for a parameter. Does not communicate.

    Args:
        value: the values, of the parameter's shape or of ``local_shape``.
        spec: the parameter's spec if it is a DTensor.
        local_shape: the shape of its local tensor.
    """
    if (
        spec is not None
        and not isinstance(value, DTensor)
        and value.shape != local_shape
    ):
        value = distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
    return local_tensor(value)


def memory_orders(values: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    """By number, the dims of each value in the order of its memory, the outermost dim first.

    Row-major values, and values whose memory has gaps or overlaps, are left out.
    """
    orders = {}
    for number, value in enumerate(values):
        dims = sorted(
            range(value.ndim),
            key=lambda dim: (-value.stride()[dim], value.shape[dim] == 1),
        )
        if dims != sorted(dims) and value.permute(dims).is_contiguous():
            orders[number] = dims
    return orders


class FlatSharding:
    """How a flat tensor of several parameters is sharded.

    Args:
        numels: number of elements of each parameter, in order.
        num_shards: size of the shard group; at least 1.
        orders: the `memory_orders` of the parameters; ``None`` if all are row-major.

    Attributes:
        numels, num_shards, orders: as given.
        numel: number of elements in all parameters, without padding.
        shard_numel: number of elements that each rank stores, including padding.
        padded_numel: number of elements in the flat tensor, including padding.
        split_sizes: sizes of the parameters, and of the padding after them if there is any.
        is_single: whether the flat tensor is one parameter without padding.
    """

    def __init__(
        self,
        numels: tuple[int, ...],
        num_shards: int,
        orders: dict[int, list[int]] | None = None,
    ) -> None:
        if num_shards < 1:
            raise ValueError(message("no-ranks", num_shards=num_shards))
        self.numels = numels
        self.num_shards = num_shards
        self.numel = sum(numels)
        # Rounded up: rounding down would leave the last elements without a rank.
        self.shard_numel = -(-self.numel // num_shards)
        self.padded_numel = self.shard_numel * num_shards
        padding = self.padded_numel - self.numel
        self.split_sizes = [*numels, padding] if padding else list(numels)
        self.is_single = len(numels) == 1 and not padding
        self.orders = orders or {}

    def shard_range(self, index: int) -> slice:
        """The elements of the padded flat tensor that rank ``index`` stores."""
        return slice(index * self.shard_numel, (index + 1) * self.shard_numel)

    def param_ranges(self, index: int) -> list[slice]:
        """For each parameter, its range inside the shard of rank ``index``. Can be empty."""
        bounds = accumulate(self.numels, initial=-index * self.shard_numel)
        # Clipped at both ends: elements before and after the shard belong to other ranks.
        clipped = [min(max(bound, 0), self.shard_numel) for bound in bounds]
        return [slice(start, stop) for start, stop in pairwise(clipped)]

    def range_in_param(self, index: int, number: int) -> slice:
        """The range of parameter ``number``, counted from its own start, that rank ``index`` stores. Can be empty."""
        first = sum(self.numels[:number]) - index * self.shard_numel
        start = min(max(-first, 0), self.numels[number])
        return slice(
            start, max(start, min(self.shard_numel - first, self.numels[number]))
        )

    def make_shard(self, values: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """The shard of rank ``index`` of the concatenated ``values``, in its own memory."""
        flat = values[0].new_zeros(self.padded_numel)
        for view, value in zip(
            self.views(flat, [value.shape for value in values]), values, strict=True
        ):
            view.copy_(value)
        # Without the clone, the shard would keep the memory of the unsharded tensor alive.
        return flat if self.num_shards == 1 else flat[self.shard_range(index)].clone()

    def flattened(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """The elements of a value for parameter ``number``, in the order of the flat tensor."""
        return (
            value.permute(self.orders[number]) if number in self.orders else value
        ).reshape(-1)

    def views(
        self, flat: torch.Tensor, shapes: Sequence[torch.Size], *, by_split: bool = True
    ) -> list[torch.Tensor]:
        """Views of the parameters in a padded flat tensor, in their shapes and memory formats.

        Args:
            flat: the tensor.
            shapes: the shapes of the parameters.
            by_split: whether all views come from one split (``flat.py``, 2). A single parameter without padding needs
                no split. Its gradient may share memory with other gradients.
        """
        parts: Sequence[torch.Tensor]
        if not by_split:
            parts = [
                flat[start:stop]
                for start, stop in pairwise(accumulate(self.numels, initial=0))
            ]
        else:
            parts = (
                [flat] if self.is_single else flat.split_with_sizes(self.split_sizes)
            )
        # A vector needs no view. The first parameter always has one, so it is never `flat` itself. The padding comes
        # last and has no shape.
        first = parts[0]
        pairs = zip(parts, shapes, strict=False)
        views = [
            part.view(shape) if part is first or part.shape != shape else part
            for part, shape in pairs
        ]
        for number, dims in self.orders.items() if self.orders else ():
            stored = parts[number].view([shapes[number][dim] for dim in dims])
            views[number] = stored.movedim(sorted(dims), dims)
        return views


class UnshardedTensor:
    """An unsharded flat tensor with its own memory, or with the memory of ``lender`` if no copy is needed.

    Args:
        numel: number of elements, including padding.
        dtype: the compute dtype.
        device: the compute device.
        lender: a tensor of this size, dtype and device, whose memory is used, or ``None``.

    Attributes:
        leaf: the tensor; autograd accumulates gradients into it.
        alias: the same memory, for writing.
        num_bytes: its size while it has memory.
        lasting_views: views of `leaf` that modules have between forwards; ``None`` until they are needed.
        version: the version of `leaf` at the last check for changes by the user.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lender: torch.Tensor | None,
    ) -> None:
        self.is_borrowed = lender is not None
        tensor = (
            torch.empty(numel, dtype=dtype, device=device)
            if lender is None
            else lender.detach()
        )
        self.num_bytes = numel * tensor.element_size()
        # 2. `.data` has its own version counter, `.detach()` does not.
        self.alias = tensor.data
        self.leaf = tensor.requires_grad_()
        self.version = tensor._version
        self.lasting_views: list[torch.Tensor] | None = None
        if lender is None:
            self.alias.untyped_storage().resize_(0)

    def use_memory_of(self, lender: torch.Tensor) -> None:
        """Uses the memory of ``lender`` from now on, if the user has given the shard other memory."""
        if lender.data_ptr() != self.alias.data_ptr():
            self.alias = self.leaf.data = lender
            self.lasting_views = None

    def allocate(self) -> None:
        """Allocates memory, with undefined values."""
        # 1. Resize the storage instead of replacing it.
        self.alias.untyped_storage().resize_(self.num_bytes)
