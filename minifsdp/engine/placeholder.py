"""Placeholder parameters: the tensors that modules have while their unit is sharded.

Outside of its forward and backward, a sharded module has no weights. This rank stores a shard of a flat tensor, which
may begin in the middle of one weight and end in the middle of the next. ``linear.weight`` could have one of three
values:

* The unsharded view from the forward. Its memory is released, and reading it returns undefined values.
* No value, because the attribute is deleted. Then ``linear.weight.shape`` in logging code raises an ``AttributeError``.
* A tensor that has a shape, dtype and device but no values. Reading its values raises an error that explains why.

minifsdp uses the third value. The usual cause of the error is a direct call of a part of a wrapped model,
``model.module[0](x)``. Only the wrapped module issues the all-gather, so the part has no weights::

    RuntimeError: rank 1: parameter '0.weight' (shape (4, 4)) is sharded right now ...

*In torch:* FSDP1 keeps the freed view. There, the same call raises an autograd error about views, works by accident
while the root is still unsharded, or crashes.

Spec: FWD-01, ORIG-11, NAMES-10.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from minifsdp.engine.layout import ParamInfo
from minifsdp.engine.messages import message
from minifsdp.engine.precision import tensors_in


class PlaceholderParameter(torch.Tensor):
    """A tensor with a shape but no values. Any operation on it raises a ``RuntimeError`` that explains the fix.

    Args:
        original: the parameter that it replaces. It has the same shape, dtype and device.
        path: the parameter's name inside its unit.
        flat_param: the flat parameter that contains it.
    """

    path: str

    # Calls go directly to the dispatcher, because the error needs no Python-level overrides.
    __torch_function__ = torch.nn.Parameter.__torch_function__

    @staticmethod
    def __new__(
        cls, original: torch.Tensor, path: str, flat_param: torch.Tensor
    ) -> Any:
        """Creates a tensor without memory."""
        new: Any = cls._make_wrapper_subclass(
            cls, original.shape, dtype=original.dtype, device=original.device
        )
        new.path = path
        new.flat_param = flat_param
        return new

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PlaceholderParameter({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        _raise_absent(self.path, self.shape)

    # These attributes do not go through the dispatcher. They read or set values, or pass them to another library (which
    # would read memory that does not exist), to another process or to a file.
    data = property(_refuse, _refuse)
    tolist = numpy = share_memory_ = __dlpack__ = __reduce_ex__ = requires_grad_ = (
        _refuse
    )
    # A module may read it before its unit is all-gathered. It can change between iterations.
    requires_grad = property(lambda self: self.flat_param.requires_grad, _refuse)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(message("copy-of-absent", path=self.path))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        next(
            t
            for t in tensors_in((args, kwargs or {}))
            if isinstance(t, PlaceholderParameter)
        )._refuse()


# The key of the guard in the forward pre-hooks of a module.
GUARD = "minifsdp: sharded"


def guards_for(
    parameters: Iterable[ParamInfo],
) -> list[tuple[dict[Any, Any], Callable[..., NoReturn]]]:
    """For each module that has one of ``parameters``: its dict of forward pre-hooks, and a guard that raises an error.

    A placeholder cannot replace an original parameter that stays registered. Between computations, such a parameter is
    a 1-D view, and most operations, but not all, reject this shape. So a guard raises the error while the module has no
    weights. While the unit computes, there is no hook and no cost.
    """
    modules = {
        info.module: (info.path, info.shape)
        for first in parameters
        for info in first.places
    }
    return [
        (module._forward_pre_hooks, functools.partial(_raise_absent, *where))
        for module, where in modules.items()
    ]


def _raise_absent(path: str, shape: torch.Size, *hook_arguments: Any) -> NoReturn:
    raise RuntimeError(message("absent", path=path, shape=tuple(shape)))
