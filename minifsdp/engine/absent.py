"""What a module shows in place of a parameter that is not here right now.

Outside of its forward and backward a sharded module has no weights: this rank stores a shard of a long flat tensor,
and the shard may begin in the middle of one weight and end in the middle of the next. What should ``linear.weight`` be
then? Three answers are possible:

* the full-size view that was there during forward: its memory has been freed, and reading it is reading garbage;
* nothing at all: ``linear.weight.shape`` in logging code would end with an ``AttributeError``;
* a tensor that knows its shape, dtype and device but has no values, and says so when it is asked for them.

This is the third. The usual way to meet it is to call a part of a wrapped model directly, ``model.module[0](x)``: only
the wrapped module knows when to gather, so the part finds its weights absent::

    RuntimeError: rank 1: parameter '0.weight' (shape (4, 4)) is sharded right now ...

*In torch:* FSDP1 leaves the freed view in place; the same call ends in an autograd message about views, works by
accident while the root is still gathered, or crashes.

Spec: FWD-01, ORIG-11, NAMES-10.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from minifsdp.engine.layout import OwnedParameter
from minifsdp.engine.messages import message
from minifsdp.engine.precision import tensors_in


class AbsentParameter(torch.Tensor):
    """A tensor with a shape and without values; any operation on it raises ``RuntimeError`` with the remedy.

    Args:
        shape, dtype, device: those of the parameter in whose place it stands.
        path: the parameter's name inside its unit.
    """

    path: str

    # Straight to the dispatcher: a refusal needs no detour through Python-level overrides.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, path: str) -> AbsentParameter:
        """Makes a tensor without memory."""
        absent: AbsentParameter = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        absent.path = path
        return absent

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentParameter({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise _absent(self.path, self.shape)

    # What does not go through the dispatcher: to read the values or to set them, and to hand them to another library,
    # which would read memory that is not there, to another process or to a file.
    data = property(_refuse, _refuse)
    tolist = numpy = share_memory_ = __dlpack__ = __reduce_ex__ = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(message("copy-of-absent", path=self.path))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        missing = next(t for t in tensors_in((args, kwargs or {})) if isinstance(t, AbsentParameter))
        raise _absent(missing.path, missing.shape)


# Under this name a module keeps the hook by which it refuses.
GUARD = "minifsdp: sharded"


def guards_for(parameters: Iterable[OwnedParameter]) -> list[tuple[dict[Any, Any], Callable[..., NoReturn]]]:
    """For each module that shows one of ``parameters``, where its hooks are, and one that refuses a forward.

    Where the original parameters stay visible, nothing can stand in their place. They show 1-D slices between
    computations, and most operations, but not all, refuse such a shape. So the module itself is told to, for the time
    in which it has no weights: while the unit computes there is no hook, and nothing to pay.
    """
    modules = {slot.module: (slot.path, owned.shape) for owned in parameters for slot in owned.slots}
    return [(module._forward_pre_hooks, functools.partial(_refuse_to_run, *what)) for module, what in modules.items()]


def _refuse_to_run(path: str, shape: torch.Size, module: Any, args: Any) -> NoReturn:
    raise _absent(path, shape)


def _absent(path: str, shape: torch.Size) -> RuntimeError:
    return RuntimeError(message("absent", path=path, shape=tuple(shape)))
