"""Mixed precision: the dtype of each step, and the recursion through nested inputs for casts and moves.

A parameter has up to three dtypes in one iteration:

==================  ===========================  =======================================
step                dtype                        reason
==================  ===========================  =======================================
stored, optimizer   that of the parameter        small updates must not round to zero
unsharded, compute  ``compute``                  half the bytes to send, faster kernels
gradient reduction  ``reduce``                   fewer bytes, or a more accurate sum
==================  ===========================  =======================================

Worked example, ``Precision(compute=bfloat16, reduce=float32)``, a unit of 8 elements on two ranks: each rank stores 4
float32 numbers (16 bytes), sends 4 bfloat16 numbers (8 bytes), and computes with 8 of them (16 bytes). Its gradient has
8 bfloat16 numbers. They are cast to float32 (32 bytes) for the sum, and the rank keeps 4 of these float32 numbers.

The stored shard and the unsharded tensor are two variables, and each has its own dtype. The engine casts once before
the all-gather, and once or twice around the reduction.

Inputs are cast as well, but only floating-point tensors. A token ID that is rounded to bfloat16 becomes another ID.

*In torch:* FSDP1 switches ``flat_param.data`` between full and low-precision storage. FSDP2 has two variables.

Spec: MP-02 to MP-17, DEV-08, STREAM-13.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Precision:
    """The dtypes of one unit; ``None`` means no cast.

    Attributes:
        compute: dtype of the unsharded parameters.
        reduce: dtype of the gradient reduction; ``None`` for the dtype in which the gradient was computed.
        keep_reduce_dtype: whether the sharded gradient keeps the dtype of the reduction.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    keep_reduce_dtype: bool = False

    def computes_in(self, stored: torch.dtype) -> torch.dtype | None:
        """The compute dtype of parameters. Complex parameters are not cast: a real dtype drops imaginary parts."""
        return None if stored.is_complex else self.compute

    def reduces_in(self, computed: torch.dtype) -> torch.dtype:
        """The dtype of the reduction of gradients that were computed in ``computed``."""
        chosen = self.reduce or computed
        return torch.promote_types(chosen, computed) if computed.is_complex else chosen


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Applies ``function`` to every tensor in ``value``, inside nested tuples, lists, dicts and dataclasses.

    Returns new containers of the same types, and does not change the caller's containers. Objects that are neither a
    tensor nor one of these containers are returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        # `batch_sizes` must stay on the CPU.
        data, order, inverse = (map_tensors(function, value[index]) for index in (0, 2, 3))
        return type(value)(data, value.batch_sizes, order, inverse)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if type(value) in (tuple, list):
        return type(value)([map_tensors(function, item) for item in value])
    if isinstance(value, Mapping):
        return _map_mapping(function, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: map_tensors(function, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    return value


def _map_mapping(function: Callable[[torch.Tensor], torch.Tensor], value: Mapping[Any, Any]) -> Any:
    items = {key: map_tensors(function, item) for key, item in value.items()}
    if type(value) is dict:
        return items
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        # A mapping with its own constructor, for example a model's output class. A shallow copy keeps its other
        # attributes, and the items are set one by one.
        copy = value.copy()  # type: ignore[attr-defined]
        for key, item in items.items():
            copy[key] = item
        return copy


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor in ``value``, in the order of `map_tensors`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def cast_floating(dtype: torch.dtype, args: Any) -> Any:
    """Casts every floating-point tensor in ``args`` to ``dtype``. Other values are unchanged."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, args)


def move(device: torch.device, args: Any) -> Any:
    """Copies every tensor in ``args`` to ``device``. The caller may overwrite ``args`` after this function returns."""
    return map_tensors(lambda t: t.to(device), args)
