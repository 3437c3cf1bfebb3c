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
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True)
class Precision:
    """The dtypes of one unit; ``None`` means no cast.

    Attributes:
        compute: dtype of the unsharded parameters.
        reduce: dtype of the gradient reduction; ``None`` for `Layout.dtype`.
        keep_reduce_dtype: whether the sharded gradient keeps the dtype of the reduction.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    keep_reduce_dtype: bool = False

    def computes_in(self, stored: torch.dtype) -> torch.dtype:
        """The compute dtype of parameters. Complex ones are not cast, because a real dtype drops imaginary parts."""
        return (self.compute or stored) if stored.is_floating_point else stored

    def reduces_in(self, computed: torch.dtype) -> torch.dtype:
        """The dtype of the reduction of gradients that were computed in ``computed``."""
        chosen = self.reduce or computed
        return torch.promote_types(chosen, computed) if computed.is_complex else chosen


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    value: Any,
    others: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Applies ``function`` to every tensor in nested tuples, lists and dicts, and returns new ones of the same types.

    Args:
        function: called with each tensor.
        value: a tensor, a container, or another object.
        others: called with every other object, for example a container of another class, see ``cases/containers.py``.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        # `batch_sizes` must stay on the CPU.
        data, order, inverse = (
            map_tensors(function, value[index], others) for index in (0, 2, 3)
        )
        return type(value)(data, value.batch_sizes, order, inverse)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item, others) for item in value))
    if type(value) in (tuple, list):
        return type(value)([map_tensors(function, item, others) for item in value])
    if type(value) is dict:
        return {key: map_tensors(function, item, others) for key, item in value.items()}
    return others(value)


def parts_of(value: Any) -> tuple[dict[Any, Any], dict[str, Any], Any] | None:
    """The items and the attributes of a container that is not a tuple, list or dict, and its pytree spec.

    Returns:
        ``None`` for an object that is not a container.
    """
    if value is None or isinstance(value, (int, float, str)):
        return None
    # Opens one level.
    items, spec = tree_flatten(value, is_leaf=lambda item: item is not value)
    attributes = getattr(value, "__dict__", {})
    if not spec.is_leaf():
        return dict(enumerate(items)), {}, spec
    if isinstance(value, Mapping):
        # Some mappings store each item a second time, as an attribute.
        return (
            dict(value.items()),
            {name: item for name, item in attributes.items() if name not in value},
            spec,
        )
    if isinstance(value, (tuple, list, set, frozenset)):
        return dict(enumerate(value)), dict(attributes), spec
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return (
            {},
            {name: getattr(value, name) for name in names if hasattr(value, name)},
            spec,
        )
    return None


def tensors_in(
    value: Any, others: list[torch.Tensor] | None = None
) -> Iterator[torch.Tensor]:
    """Yields every tensor in ``value``, in the order of `map_tensors`, and ``batch_sizes`` of a ``PackedSequence``.

    Looks inside tuples, lists, dicts and sets, also of a user's class, inside mappings and dataclasses, and inside
    classes that are registered with ``torch.utils._pytree``, for example deques.

    Args:
        value: a tensor, a container, or another object, in which no tensor is found.
        others: to this list, adds the tensors in containers that are not a tuple, list or dict.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list, dict) or (
        isinstance(value, tuple) and hasattr(value, "_fields")
    ):
        for item in value.values() if type(value) is dict else value:
            yield from tensors_in(item, others)
    elif (parts := parts_of(value)) is not None:
        for tensor in tensors_in(parts[:2]):
            if others is not None:
                others.append(tensor)
            yield tensor
