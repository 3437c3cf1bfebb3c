"""Which memory an operator reads and writes, from its schema.

The schema of an operator declares for each argument whether it is written (``Tensor(a!)``), and for each result whether
it is a view of an argument (``Tensor(a)``). Nearly everything follows from this:

* ``add(Tensor self, Tensor other) -> Tensor``: reads both, writes a new tensor;
* ``add_(Tensor(a!) self, ...)``: writes the first; for the order, a write counts as a read and a write;
* ``view(Tensor(a) self, ...) -> Tensor(a)``: accesses no memory, launches no kernel;
* ``empty(...)``: allocates memory and does not access it.

The names below are the exceptions.

Spec: SIM-02.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Signature", "signature_of"]

NO_KERNEL = {
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty_strided",
    "aten::set_",
    "aten::resize_",
    "aten::lift_fresh",
    "aten::detach",
    "aten::_unsafe_view",
    "aten::is_same_size",
    "aten::_reshape_alias",
}
# These use only the shape and the dtype of their first argument, not its values.
ONLY_SHAPE = ("aten::new_", "_like")
# The CPU waits for the result of these.
STOPS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}
# These accept both device and CPU tensors: copies, and indexing.
MIXES = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::_copy_from", "aten::index_put_", "aten::index_put"}


@dataclass(frozen=True, slots=True)
class Signature:
    """The properties of one operator.

    Attributes:
        name: with its namespace.
        writes: by position, whether the argument is written.
        written_names: the same for keyword arguments.
        is_kernel: whether it accesses memory at all.
        reads: whether it reads the values of its inputs.
        returns_view: whether a result shares memory with an argument.
        stops_host: whether the CPU waits for the result.
        may_mix: whether its arguments can be on different devices.
        is_copy: whether it is the copy between two tensors, or into a new one.
        asynchronous_at: position of the argument ``non_blocking``; -1 if there is none.
        is_composite: consists of other operators, like ``to``; with inference tensors torch dispatches it as one.
    """

    name: str
    writes: tuple[bool, ...]
    written_names: frozenset[str]
    is_kernel: bool
    reads: bool
    returns_view: bool
    stops_host: bool
    may_mix: bool
    is_copy: bool
    asynchronous_at: int
    is_composite: bool


_known: dict[Any, Signature] = {}


def signature_of(operator: Any) -> Signature:
    """The signature of an overload such as ``torch.ops.aten.add.Tensor``."""
    found = _known.get(operator)
    if found is None:
        found = _known[operator] = _read(operator)
    return found


def _read(operator: Any) -> Signature:
    schema = operator._schema
    name = schema.name
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    names = [a.name for a in schema.arguments]
    returns_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    # An operator that returns a number either reads only the shape, or makes the CPU wait.
    makes_tensors = any(writes) or any("Tensor" in str(r.type) for r in schema.returns) or name in STOPS
    return Signature(
        name=name,
        writes=tuple(writes),
        written_names=frozenset(n for n, is_written in zip(names, writes, strict=True) if is_written),
        is_kernel=makes_tensors and not (name in NO_KERNEL or returns_view),
        reads=not (name.startswith(ONLY_SHAPE[0]) or name.endswith(ONLY_SHAPE[1])),
        returns_view=returns_view,
        stops_host=name in STOPS,
        may_mix=name in MIXES,
        is_copy=name in ("aten::copy_", "aten::_to_copy"),
        asynchronous_at=names.index("non_blocking") if "non_blocking" in names else -1,
        is_composite=operator._can_decompose(),
    )
