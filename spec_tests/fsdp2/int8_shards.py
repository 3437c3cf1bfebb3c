"""A parameter that travels in 8 bits: a readable example of the tensor-subclass extension.

The idea. Gathering is what costs, and the values need not travel in full precision. A parameter whose local tensor is
of a class with two methods decides for itself:

1. ``fsdp_pre_all_gather`` runs on each rank before the gather and says *what is sent*: here the shard as ``int8`` plus
   one scale for each rank, both of them as tensors, since only tensors travel;
2. ``fsdp_post_all_gather`` runs after it and says *what the layer computes with*: here ordinary floats again.

Two ranks, one row each, both in steps of 1/127 of the largest absolute value of the row::

    rank 0 sends   int8 [127, -64]   scale 0.5/127        = 0.5, -0.252
    rank 1 sends   int8 [ 32, 127]   scale 2.0/127        = 0.504, 2.0

Four times less on the wire than float32, and an error of at most half a step. What the optimizer owns stays float32:
the class only holds its values, quantising happens on the way.

Gradients know nothing of all this: they are those of the tensor that the layer computed with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["FromHalf", "Int8Shards", "Plain", "extended"]


class Holds(Tensor):
    """A tensor that consists of another one. What torch does with it, it does with that one, and wraps the result."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Holds:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], context: None, size: Any, stride: Any) -> Holds:
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken, named = pytree.tree_map_only(Holds, lambda held: held.inner, (args, kwargs or {}))
        result = func(*taken, **named)
        if func in KEEPS_THE_CLASS:
            return pytree.tree_map_only(Tensor, cls, result)
        # An in-place operation returns the very tensor that was given.
        return args[0] if func._schema.name.endswith("_") else result

    def __repr__(self, *, tensor_contents: None = None) -> str:
        return f"{type(self).__name__}({self.inner!r})"


aten = torch.ops.aten
# What sharding itself does with a parameter before it is one: cutting, padding, moving, viewing.
KEEPS_THE_CLASS = {
    aten.detach.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.narrow.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.copy_.default,
    aten._pin_memory.default,
    aten.alias.default,
}


class Int8Shards(Holds):
    """Sent as ``int8`` with one scale for each rank."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        # Of an empty shard the largest value is nothing; of a shard of zeros it is zero.
        largest = self.inner.abs().max() if self.inner.numel() else self.inner.new_zeros(())
        scale = (largest / 127).clamp(min=1e-12)
        return ((self.inner / scale).round().to(torch.int8), scale.reshape(1)), outer_size

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        steps, scales = gathered
        rows_of_each_rank = steps.reshape(scales.numel(), -1, *steps.shape[1:])
        values = rows_of_each_rank.to(param_dtype) * scales.reshape(-1, *[1] * steps.ndim).to(param_dtype)
        whole = values.reshape(metadata)
        if out is None:
            return whole, (whole,)
        # The layer keeps one tensor for the whole training; its memory comes and goes.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class Plain(Holds):
    """Sent as it is: the extension that changes nothing."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.inner,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (whole,) = gathered
        if out is None:
            return whole, (whole,)
        # Filled by the gather itself: what was given the first time is the memory that is gathered into.
        assert out.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        return None


class FromHalf(Holds):
    """Has only the first of the two methods, by mistake."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.inner,), None


def extended(model: nn.Module, kind: type[Holds]) -> nn.Module:
    """Replaces each two-dimensional parameter by one whose tensor is of ``kind``; in place, and returned."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 2:
                setattr(module, name, nn.Parameter(kind(parameter.detach().clone())))
    return model
