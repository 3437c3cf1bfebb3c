"""A parameter that is all-gathered as 8-bit integers: a readable example of the tensor-subclass extension.

The all-gather is expensive, and the values do not need full precision for it. A parameter can define its own
all-gather if the class of its local tensor has two methods:

1. ``fsdp_pre_all_gather`` runs on each rank before the all-gather and returns *the tensors to send*: here the shard as
   ``int8`` and one scale per rank. The scale is a tensor too, because only tensors can be sent.
2. ``fsdp_post_all_gather`` runs after it and returns *the tensor that the layer computes with*: here floats again.

Example: two ranks with one row each. The step of each rank is 1/127 of the largest absolute value in its row::

    rank 0 sends   int8 [127, -64]   scale 0.5/127        = 0.5, -0.252
    rank 1 sends   int8 [ 32, 127]   scale 2.0/127        = 0.504, 2.0

This sends a quarter of the bytes of float32, with an error of at most half a step. The optimizer's shard stays float32:
the class only wraps its values, and quantization happens during the all-gather.

The gradients are those of the tensor that the layer computed with; quantization does not affect them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# The operations that sharding applies to a parameter: split, pad, copy to a device, view. Their results keep the class.
KEEPS_THE_CLASS = {
    *("detach", "view", "alias", "as_strided", "slice", "narrow", "split"),
    *("clone", "copy_", "_to_copy", "_pin_memory", "new_zeros", "empty_like"),
}


class Holds(Tensor):
    """A tensor that wraps another one. Torch operations run on the inner tensor, and their result is wrapped."""

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
        name = func._schema.name.removeprefix("aten::")
        if name in KEEPS_THE_CLASS:
            return pytree.tree_map_only(Tensor, cls, result)
        # An in-place operation returns its own argument.
        return args[0] if name.endswith("_") else result

    def __repr__(self, *, tensor_contents: None = None) -> str:
        return f"{type(self).__name__}({self.inner!r})"


class Int8Shards(Holds):
    """An extension that all-gathers ``int8`` values with one scale per rank."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        # `max` fails on an empty shard. For a shard of zeros, the clamp below avoids a division by zero.
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
        # The layer keeps one tensor object for the whole training; its storage is freed and allocated again.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class Plain(Holds):
    """An extension that all-gathers the tensor unchanged."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        return (self.inner,), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (whole,) = gathered
        if out is None:
            return whole, (whole,)
        # The all-gather has filled `out` itself: its output buffer is the memory returned in the first call.
        assert out.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        return None


def extended(model: nn.Module, kind: type[Holds]) -> nn.Module:
    """Replaces each two-dimensional parameter, in place, by one whose tensor is of ``kind``; returns the model."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 2:
                setattr(module, name, nn.Parameter(kind(parameter.detach().clone())))
    return model


def local(tensor: Any) -> Tensor:
    """The tensor that the shard of a `DTensor` wraps, or the shard itself."""
    mine = tensor.to_local()
    return mine.inner if isinstance(mine, Holds) else mine


def step_by_hand(*models: nn.Module) -> None:
    """A step of gradient descent on the inner tensors. Removes the gradients."""
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                local(parameter).sub_(local(parameter.grad), alpha=0.1)
            model.zero_grad()
