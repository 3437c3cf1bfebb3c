"""Which dtype at which step, and the walk through nested inputs that casting and moving share.

A parameter passes through up to three dtypes in one iteration:

==================  ===========================  =======================================
step                dtype                        why
==================  ===========================  =======================================
stored, optimizer   that of the parameter        small updates must not round to nothing
gathered, compute   ``compute``                  half the bytes to send, faster kernels
gradient in travel  ``reduce``                   half the bytes, or full for a safer sum
==================  ===========================  =======================================

Worked example, ``Precision(compute=bfloat16, reduce=float32)``, a unit of 8 elements on two ranks: each rank stores 4
float32 numbers (16 bytes), sends 4 bfloat16 numbers (8 bytes), computes on 8 of them (16 bytes), gets a bfloat16
gradient of 8, widens it to float32 (32 bytes) for the sum, and keeps 4 float32 numbers of it.

With two variables, the stored shard and the gathered tensor, each simply *has* its dtype: nothing is swapped, and the
only casts are one before the gather and one or two around the reduction.

Inputs are cast as well, floating-point tensors only: a token's number, rounded to bfloat16, would be another token's.

*In torch:* FSDP1 switches ``flat_param.data`` between a full and a low-precision storage; FSDP2 has the two variables.

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
    """The dtypes of one unit; ``None`` leaves that step as it is.

    Attributes:
        compute: dtype of the gathered parameters.
        reduce: dtype in which gradients travel; ``None`` follows the dtype in which they were computed.
        keep_reduce_dtype: leave the sharded gradient in the dtype in which it travelled.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    keep_reduce_dtype: bool = False

    def computes_in(self, stored: torch.dtype) -> torch.dtype | None:
        """The compute dtype of parameters. Complex ones keep theirs, because a real dtype drops imaginary parts."""
        return None if stored.is_complex else self.compute

    def reduces_in(self, computed: torch.dtype) -> torch.dtype:
        """The dtype in which gradients travel that were computed in ``computed``."""
        chosen = self.reduce or computed
        return torch.promote_types(chosen, computed) if computed.is_complex else chosen


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with every tensor in it replaced, through tuples, lists, dicts and dataclasses, of any nesting.

    The containers are made anew with their own type, so the caller's are not changed; what is neither a tensor nor
    one of these containers is passed on as it is.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return value.__class__(*(map_tensors(function, item) for item in value))
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
        # A mapping with a constructor of its own (a model's output class, say): a shallow copy keeps its other
        # attributes, and its items are set one by one.
        copy = value.copy()  # type: ignore[attr-defined]
        for key, item in items.items():
            copy[key] = item
        return copy


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, in the order in which `map_tensors` would meet them."""
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
    """``args`` with every floating-point tensor in ``dtype``; other tensors and everything else unchanged."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t, args)


def move(device: torch.device, args: Any) -> Any:
    """``args`` with every tensor on ``device``. The copy has read its source on return: the caller may write there."""
    return map_tensors(lambda t: t.to(device), args)
