"""Checks on all ranks whether the model's state dict fits, before any of it is loaded.

The walk of ``nn.Module`` finds a missing key only after it has overwritten a part of the model. And the rows of a
sharded dict are all-gathered, so a rank that stops there leaves the others waiting. So the outermost wrapper checks the
whole dict first, and the ranks compare their problems. Worked example, two ranks, rank 1 has read a damaged file::

    rank 0 finds    nothing                                          raises, because of rank 1
    rank 1 finds    Missing key(s) in state_dict: "0.bias"           raises

The model is unchanged on both ranks.

Modules with custom loading code (``_load_from_state_dict`` overridden, or a hook that renames keys) are not checked:
their code may accept a missing key, or a value with another shape.

*In torch:* only the rank that notices a problem raises, halfway through.

Spec: SD-FULL-09, SD-SHARD-03, SD-LOCAL-04.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from minifsdp.checkpoint import agreement, chunks
from minifsdp.checkpoint.codec import Form, UnitCodec
from minifsdp.checkpoint.custom_state import reads_by_itself
from minifsdp.checkpoint.names import dotted, keys_below
from minifsdp.engine.flat_params import FLAT_NAME
from minifsdp.engine.messages import detail
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.wrapper import Wrapper

# The beginning of the error message of nn.Module.
OPENING = "Error(s) in loading state_dict for FullyShardedDataParallel: "


class Expected:
    """The keys and shapes that a dict must have.

    Args:
        tree: all modules to load, each with the prefix of its keys.
        codecs: of the units among them.

    Attributes:
        in_units: by key, the unit that the value belongs to, and the parameter's number in it.
        rest: by key, the shape of all other tensors: buffers, ignored and plain parameters.
        optional: keys that may be missing.
        elsewhere: prefixes of keys that a module loads with custom code.
    """

    def __init__(self, tree: Sequence[tuple[str, nn.Module]], codecs: Sequence[UnitCodec]) -> None:
        self.in_units = {key: (codec, number) for codec in codecs for number, key in codec.keys}
        self.elsewhere = tuple(start for start, module in tree if reads_by_itself(module))
        self.optional = {start + "_extra_state" for start, _ in tree}
        self.rest: dict[str, tuple[int, ...]] = {}
        for start, module in tree:
            for name, tensor in _registered(module):
                if start + name not in self.in_units:
                    self.rest[start + name] = tuple(tensor.shape)
                if name == "num_batches_tracked":
                    # Dicts of torch before 0.4.1 have no such counter, and the layer accepts that.
                    self.optional.add(start + name)


def is_hidden(wrapper: Wrapper) -> bool:
    """Whether `summon_full_params` with ``rank0_only`` is active and this rank has no full parameters."""
    unit = wrapper._unit
    return unit is not None and unit.phase is Phase.SUMMONED and not unit.layout.is_summoned


@chunks.unadvised()
def refuse_misfit(wrapper: Wrapper, form: Form, state: Mapping[str, Any], prefix: str, strict: bool) -> None:
    """Raises on all ranks if the dict of any rank does not fit. All ranks of the units' groups must call it.

    Args:
        wrapper: the outermost one that loads.
        form: the chosen form.
        state: the dict, with plain names.
        prefix: of the wrapper in the dict.
        strict: whether missing and unexpected keys are errors.

    Raises:
        StateDictMismatchError: with keys, expected, found, and ranks.
    """
    tree = [(prefix + dotted(path), module) for path, module in wrapper.named_modules(remove_duplicate=False)]
    wrappers = [(start, module) for start, module in tree if isinstance(module, Wrapper)]
    codecs = [UnitCodec(inner, start) for start, inner in wrappers if inner._unit is not None]
    groups = agreement.groups_of(inner.mesh for _, inner in wrappers)
    expected = Expected(tree, codecs)
    if form.is_local:
        problems = [problem for codec in codecs for problem in _local_problems(codec, state, strict)]
    else:
        problems = [*(_key_problems(state, prefix, expected) if strict else ())]
        problems.extend(_value_problems(state, expected, form))
    problems.extend(detail("load-while-hidden", unit=start) for start, inner in wrappers if is_hidden(inner))
    agreement.refuse_together(groups, problems, OPENING)
    if not form.is_local:
        # Rows are all-gathered key by key, and a full value must be loaded on all ranks or on none.
        held = {key for key, value in state.items() if not form.is_sharded or chunks.local_rows(value) is not None}
        rows = (key for key in expected.in_units if key in held)
        agreement.refuse_lacking(groups, (detail("rows-lacking-of-unit", key=key) for key in rows), OPENING)


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    left_out = {FLAT_NAME, *module._non_persistent_buffers_set}
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and name not in left_out and not is_lazy(tensor):
            yield name, tensor


def _key_problems(state: Mapping[str, Any], prefix: str, expected: Expected) -> Iterator[str]:
    known = {**{key: tuple(codec.shapes[n]) for key, (codec, n) in expected.in_units.items()}, **expected.rest}
    for key in known:
        if key not in state and key not in expected.optional and not key.startswith(expected.elsewhere):
            yield detail("key-missing", key=key, shape=known[key])
    for key in keys_below(state, prefix):
        if key not in known and key not in expected.optional and not key.startswith(expected.elsewhere):
            yield detail("key-unexpected", key=key)


def _value_problems(state: Mapping[str, Any], expected: Expected, form: Form) -> Iterator[str]:
    """Values with a wrong shape, or in another form than the chosen one."""
    for key, shape in expected.rest.items():
        found = tuple(getattr(state.get(key), "shape", shape))
        # Old versions of torch saved a 0-d tensor as a tensor of one element, and nn.Module still reads it.
        is_old = (shape, found) == ((), (1,))
        if found != shape and not is_old and not key.startswith(expected.elsewhere):
            yield detail("size-mismatch", key=key, shape=shape, found=found)
    given = {key: whose for key, whose in expected.in_units.items() if key in state}
    for key, (codec, number) in given.items():
        yield from codec.misfit(number, key, state[key], form, any_shape=key.startswith(expected.elsewhere))
    if form.is_sharded:
        yield from chunks.all_full((key, state[key]) for key, (codec, _) in given.items() if codec.group is not None)


def _local_problems(codec: UnitCodec, state: Mapping[str, Any], strict: bool) -> Iterator[str]:
    where, found, mine = codec.local_key, codec.given_local_shard(state), codec.layout.local_values()
    if found is None and strict:
        yield detail("local-missing", where=where, expected=mine.numel())
    if found is not None and not isinstance(found, torch.Tensor):
        yield detail("no-tensor", key=where, type=type(found).__name__)
    elif found is not None and (found.numel(), found.dtype) != (mine.numel(), mine.dtype):
        size, dtype = found.numel(), found.dtype
        yield detail("local-size", where=where, found=size, mine=mine.numel(), found_dtype=dtype, dtype=mine.dtype)
