"""Inputs and outputs in containers of other classes than tuple, list and dict.

A model takes and returns objects of its own class::

    @dataclass
    class Batch:
        tokens: torch.Tensor
        mask: torch.Tensor

    model = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    loss = model(Batch(tokens, mask)).loss

Without this case, the tensors in such objects are neither moved to the device nor cast. The forward then raises an
error about two devices or two dtypes.

`parts_of` opens a container. This module builds a new container of the same class from other parts. A mapping or a
sequence may have a constructor of its own, so several ways are tried.

*In torch:* FSDP1 handles dataclasses, dicts and sequences in ``_apply_to_tensors``; FSDP2 handles pytrees.

Spec: DEV-08, MP-02, MP-17.
"""

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from minifsdp.engine import precision
from minifsdp.engine.precision import parts_of, tensors_in


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Applies ``function`` to every tensor in ``value``, inside nested containers, see `tensors_in`.

    Returns new containers of the same types, and does not change the caller's containers. A tuple, list or dict is
    always new. A container of another class is only new if a tensor in it has changed. Objects that are neither a
    tensor nor a container are returned unchanged.
    """

    def of_another_class(value: Any) -> Any:
        parts = parts_of(value)
        if parts is None:
            return value
        items, attributes = map_tensors(function, parts[:2])
        # The module may change the container, as a cache does. The caller only finds changes in the same object.
        is_same = all(
            map(operator.is_, tensors_in(parts[:2]), tensors_in((items, attributes)))
        )
        return value if is_same else _rebuilt(value, items, attributes, parts[2])

    return precision.map_tensors(function, value, of_another_class)


def _rebuilt(
    value: Any, items: dict[Any, Any], attributes: dict[str, Any], spec: Any
) -> Any:
    """A container of the class of ``value`` with these items and attributes."""
    if not spec.is_leaf():
        return spec.unflatten(items.values())
    if isinstance(value, Mapping):
        try:
            made: Any = type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            # A mapping with its own constructor, for example a model's output class. `dict.copy` returns a plain dict.
            has_copy = type(value).copy is not dict.copy  # type: ignore[attr-defined]
            made = value.copy() if has_copy else copy.copy(value)  # type: ignore[attr-defined]
            for key, item in items.items():
                made[key] = item
    elif isinstance(value, (tuple, list, set, frozenset)):
        try:
            made = type(value)(items.values())
        except TypeError:
            # A class with a constructor of its own.
            made = (
                tuple.__new__(type(value), items.values())
                if isinstance(value, tuple)
                else copy.copy(value)
            )
            if isinstance(value, list):
                made[:] = items.values()
    else:
        # The constructor of a dataclass may compute fields or have other arguments.
        made = copy.copy(value)
    for name, item in attributes.items():
        object.__setattr__(made, name, item)
    return made


def cast_floating(dtype: torch.dtype, args: Any) -> Any:
    """Casts every floating-point tensor in ``args`` to ``dtype``. Other values are unchanged."""
    return map_tensors(
        lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t,
        args,
    )


def move(device: torch.device, args: Any) -> Any:
    """Moves every tensor in ``args`` to ``device``. A tensor that is there already is not copied."""
    return map_tensors(lambda t: t.to(device), args)
