"""Does the model's state dict fit? Asked before anything is read, on all ranks together.

The walk of ``nn.Module`` finds a missing key when half of the model has been overwritten; and for a sharded dict rows
are gathered, so a rank that stops there leaves the others waiting. So the outermost wrapper looks through the whole
dict first, and the ranks compare what they found. Worked example, two ranks, rank 1 has read a damaged file::

    rank 0 finds    nothing                                          raises, because of rank 1
    rank 1 finds    Missing key(s) in state_dict: "0.bias"           raises

and on both the model is as it was.

What a module reads with custom code (``_load_from_state_dict`` overridden, or a hook that renames keys) is left to that
code: there a key may be missing on purpose, or a value have another shape.

*In torch:* a dict that does not fit is refused by whoever notices, halfway through.

Spec: SD-FULL-09, SD-SHARD-03, SD-LOCAL-04.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import is_tensor_like

from minifsdp.checkpoint import agreement, chunks
from minifsdp.checkpoint.codec import Form, UnitCodec
from minifsdp.checkpoint.custom_state import reads_by_itself
from minifsdp.checkpoint.names import dotted
from minifsdp.checkpoint.state_dict import LOCAL_NAME
from minifsdp.engine.flat_parameter import FLAT_NAME
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import detail
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.wrapper import Wrapper

# What nn.Module says first.
OPENING = "Error(s) in loading state_dict for FullyShardedDataParallel: "


@dataclass
class Expected:
    """What a dict must have below some prefix.

    Attributes:
        in_units: by key, shape and shard group of what belongs to a unit.
        rest: by key, the shape of everything else: buffers, ignored and plain parameters.
        optional: keys that may be missing.
        elsewhere: beginnings of keys that a module reads with code of its own.
    """

    in_units: dict[str, tuple[tuple[int, ...], Group | None]] = field(default_factory=dict)
    rest: dict[str, tuple[int, ...]] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    elsewhere: list[str] = field(default_factory=list)

    def is_elsewhere(self, key: str) -> bool:
        """Whether a module has a say in what becomes of ``key``."""
        return any(key.startswith(start) for start in self.elsewhere)


@chunks.unadvised()
def refuse_misfit(wrapper: Wrapper, form: Form, state: Mapping[str, Any], prefix: str, strict: bool) -> None:
    """Raises on all ranks if the dict of any does not fit. All ranks of the units' groups must call it.

    Args:
        wrapper: the outermost one that reads.
        form: the chosen one.
        state: the dict, with plain names.
        prefix: of the wrapper in it.
        strict: whether keys must be neither missing nor unexpected.

    Raises:
        StateDictMismatchError: with keys, expected, found, and ranks.
    """
    wrappers = [
        (prefix + dotted(name), module)
        for name, module in wrapper.named_modules(remove_duplicate=False)
        if isinstance(module, Wrapper)
    ]
    groups = agreement.groups_of(inner.mesh for _, inner in wrappers)
    agreement.monitored_barrier(groups, "load_state_dict()")
    if form.is_local:
        local = [problem for path, w in wrappers for problem in _local_problems(w._unit, state, path, strict)]
        agreement.refuse_together(groups, local, OPENING)
        return
    expected = _expected(wrapper, wrappers, prefix)
    problems = [*(_key_problems(state, prefix, expected) if strict else ())]
    problems.extend(_value_problems(state, expected, form.is_sharded))
    agreement.refuse_together(groups, problems, OPENING)
    if form.is_sharded:
        # Rows are gathered key by key.
        rows = (key for key in expected.in_units if key in state and chunks.local_rows(state[key]) is not None)
        agreement.refuse_lacking(groups, (detail("rows-lacking-of-unit", key=key) for key in rows), OPENING)


def _expected(wrapper: Wrapper, wrappers: Iterable[tuple[str, Wrapper]], prefix: str) -> Expected:
    expected = Expected()
    owned: set[int] = set()
    for path, inner in wrappers:
        unit = inner._unit
        if unit is not None:
            owned.update(map(id, unit.layout.local_parameters()))
            codec = UnitCodec(inner, path)
            expected.in_units.update({key: (tuple(codec.shapes[n]), codec.group) for n, key in codec.keys})
    for path, module in wrapper.named_modules(remove_duplicate=False):
        start = prefix + dotted(path)
        if reads_by_itself(module, num_expected_hooks=int(isinstance(module, Wrapper))):
            expected.elsewhere.append(start)
        if isinstance(module, Wrapper) or hasattr(module, "_checkpoint_wrapped_module"):
            continue
        for name, tensor in _registered(module):
            key = start + name
            if key not in expected.in_units and id(tensor) not in owned:
                expected.rest[key] = tuple(tensor.shape)
                # Dicts of torch before 0.4.1 have no such count, and the layer does without.
                if name == "num_batches_tracked":
                    expected.optional.add(key)
        expected.optional.add(start + "_extra_state")
    return expected


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name not in module._non_persistent_buffers_set and not is_lazy(tensor):
            yield name, tensor


def _key_problems(state: Mapping[str, Any], prefix: str, expected: Expected) -> Iterator[str]:
    known = {**{key: shape for key, (shape, _) in expected.in_units.items()}, **expected.rest}
    missing = [key for key in known if key not in state and key not in expected.optional]
    for key in missing:
        if not expected.is_elsewhere(key):
            yield detail("key-missing", key=key, shape=known[key])
    for key in state:
        if (
            key.startswith(prefix)
            and key not in known
            and key not in expected.optional
            and not expected.is_elsewhere(key)
        ):
            yield detail("key-unexpected", key=key)


def _value_problems(state: Mapping[str, Any], expected: Expected, is_sharded: bool) -> Iterator[str]:
    """Values of a wrong shape, or in another form than the chosen one."""
    for key, shape in expected.rest.items():
        found = getattr(state.get(key), "shape", None)
        # One number without dimensions was saved as a tensor of one element long ago, and nn.Module still reads it.
        is_old = shape == () and found is not None and tuple(found) == (1,)
        if found is not None and tuple(found) != shape and not is_old and not expected.is_elsewhere(key):
            yield detail("size-mismatch", key=key, shape=shape, found=tuple(found))
    given = {key: state[key] for key in expected.in_units if key in state}
    for key, value in given.items():
        yield from misfit(key, value, expected, is_sharded)
    if is_sharded:
        shared = [item for item in given.items() if expected.in_units[item[0]][1] is not None]
        yield from chunks.all_full(shared)


def misfit(key: str, value: Any, expected: Expected, is_sharded: bool) -> Iterator[str]:
    """What is wrong with one value of a unit, in words."""
    shape, group = expected.in_units[key]
    is_rows = chunks.local_rows(value) is not None
    if not is_tensor_like(value):
        yield detail("no-tensor", key=key, type=type(value).__name__)
    elif is_rows and not is_sharded:
        yield detail("full-expected", where=key, type=type(value).__name__)
    elif tuple(value.size()) != shape and not expected.is_elsewhere(key):
        yield detail("size-mismatch-of-unit", key=key, shape=shape, found=tuple(value.size()))
    elif is_rows and tuple(value.size()) == shape:
        yield from chunks.misplaced_rows(value, key, group)


def _local_problems(unit: FlatUnit | None, state: Mapping[str, Any], prefix: str, strict: bool) -> Iterator[str]:
    if unit is None:
        return
    where, value, mine = prefix + LOCAL_NAME, local_value(state, prefix), unit.layout.local_values()
    if value is None:
        if strict:
            yield detail("local-missing", where=where, expected=mine.numel())
        return
    local = chunks.local_rows(value)
    found = value.numel() if local is None else local.numel()
    if found != mine.numel() or value.dtype is not mine.dtype:
        yield detail(
            "local-size", where=where, found=found, mine=mine.numel(), found_dtype=value.dtype, dtype=mine.dtype
        )


def local_value(state: Mapping[str, Any], prefix: str) -> Any:
    """What a local dict has for the unit below ``prefix``, under either of its names; ``None`` if nothing."""
    return next((state[prefix + name] for name in (LOCAL_NAME, FLAT_NAME) if prefix + name in state), None)
