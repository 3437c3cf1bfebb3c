"""Checks of a state dict before any value of it is loaded. Each check describes what does not fit.

The walk of ``nn.Module`` finds a missing key only after it has overwritten a part of the model. So `refuse_misfit`
checks the whole dict first, and the ranks compare their problems.

Worked example, two ranks, a parameter ``0.weight`` of shape (3, 2), and a dict of ``DTensor`` objects that were saved
with another order of ranks: the first row of rank 0 is row 2 instead of row 0. Both ranks raise an error that names
``0.weight``, the two rows and the mesh of the ``DTensor``.

*In torch:* each module raises for its own keys, after other modules were loaded.

Spec: SD-FULL-09, SD-FULL-13, SD-SHARD-03, SD-LOCAL-04.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import DebugLevel, get_debug_level
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parameter import is_lazy
from torch.overrides import is_tensor_like

from minifsdp.checkpoint import state_dict, tensors
from minifsdp.checkpoint.codec import UnitCodec, dotted
from minifsdp.checkpoint.state_dict_options import Form
from minifsdp.checks import agreement
from minifsdp.checks.details import detail, some
from minifsdp.engine.exchange import groups_of
from minifsdp.engine.flat_params import FLAT_NAME
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.shards import shard_range
from minifsdp.fsdp1.wrapper import Wrapper

# The beginning of the error message of nn.Module.
OPENING = "Error(s) in loading state_dict for FullyShardedDataParallel: "


def refuse_misfit(
    wrapper: Wrapper, form: Form, state: Mapping[str, Any], prefix: str, *, strict: bool
) -> None:
    """Raises on all ranks if the dict of any rank does not fit. All ranks of the units' groups must call it."""
    modules = [
        (prefix + dotted(path), module)
        for path, module in wrapper.named_modules(remove_duplicate=False)
    ]
    wrappers = [
        (start, module) for start, module in modules if isinstance(module, Wrapper)
    ]
    codecs = [
        UnitCodec(inner, start) for start, inner in wrappers if inner._unit is not None
    ]
    groups = groups_of(inner._mesh for _, inner in wrappers)
    if form.is_local:
        problems = [
            problem
            for codec in codecs
            for problem in _local_problems(codec, state, strict)
        ]
    else:
        problems = list(_problems(state, prefix, modules, codecs, form, strict=strict))
    problems.extend(
        detail("load-while-hidden", unit=start)
        for start, inner in wrappers
        if state_dict.is_hidden(inner)
    )
    agreement.refuse_together(groups, problems, OPENING)
    if not form.is_local:
        # Rows are all-gathered key by key, and a full value must be loaded on all ranks or on none.
        held = {
            key
            for key, value in state.items()
            if not form.is_sharded or tensors.is_sharded(value)
        }
        rows = (key for codec in codecs for key in codec.keys if key in held)
        agreement.refuse_lacking(
            groups, (detail("rows-lacking-of-unit", key=key) for key in rows), OPENING
        )


def refuse_values(codec: UnitCodec, given: Mapping[str, Any], form: Form) -> None:
    """Raises on this rank if a value for a parameter of the unit does not fit."""
    problems = [
        problem
        for key, value in given.items()
        for problem in misfit(codec, key, key, value, form)
    ]
    agreement.refuse_together([], problems, OPENING)


def _problems(
    state: Mapping[str, Any],
    prefix: str,
    modules: Sequence[tuple[str, nn.Module]],
    codecs: Sequence[UnitCodec],
    form: Form,
    *,
    strict: bool,
) -> Iterator[str]:
    """Missing and unexpected keys, values with a wrong shape, and values in another form than the chosen one."""
    codec_of = {key: codec for codec in codecs for key in codec.keys}
    # The shape of every tensor that a dict must have: of the units' parameters and of all other tensors.
    shapes = {key: tuple(codec.shapes[key]) for key, codec in codec_of.items()}
    for start, module in modules:
        left_out = {FLAT_NAME, *module._non_persistent_buffers_set}
        for name, tensor in [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]:
            if name not in left_out and not is_lazy(tensor):
                shapes.setdefault(start + name, tuple(tensor.shape))
    # Prefixes of keys that a module loads with custom code.
    elsewhere = tuple(
        start for start, module in modules if state_dict.loads_itself(module)
    )
    for key, shape in shapes.items():
        is_elsewhere = key.startswith(elsewhere)
        found = tuple(getattr(state.get(key), "shape", shape))
        # Old versions of torch saved a 0-d tensor as a tensor of one element, and nn.Module still reads it.
        is_old = (shape, found) == ((), (1,))
        # Dicts of torch before 0.4.1 have no counter of batches, and batch norms accept that.
        is_counter = key.rpartition(".")[2] == "num_batches_tracked"
        if key not in state:
            if strict and not is_counter and not is_elsewhere:
                yield detail("key-missing", key=key, shape=shape)
        elif key in codec_of:
            yield from misfit(
                codec_of[key], key, key, state[key], form, any_shape=is_elsewhere
            )
        elif found != shape and not is_old and not is_elsewhere:
            yield detail("size-mismatch", key=key, shape=shape, found=found)
    known = {*shapes, *(start + "_extra_state" for start, _ in modules)}
    for key in state if strict else ():
        if (
            key.startswith(prefix)
            and key not in known
            and not key.startswith(elsewhere)
        ):
            yield detail("key-unexpected", key=key)
    if form.is_sharded:
        sharded = [
            key
            for key, codec in codec_of.items()
            if codec.group is not None and key in state
        ]
        yield from all_unsharded((key, state[key]) for key in sharded)


def _local_problems(
    codec: UnitCodec, state: Mapping[str, Any], strict: bool
) -> Iterator[str]:
    where = codec.local_key
    found = codec.given_shard(state)
    mine = codec.layout.local_values()
    if found is None:
        if strict:
            yield detail("local-missing", where=where, expected=mine.numel())
    elif not isinstance(found, torch.Tensor):
        yield detail("no-tensor", key=where, type=type(found).__name__)
    elif (found.numel(), found.dtype) != (mine.numel(), mine.dtype):
        yield detail(
            "local-size",
            where=where,
            found=found.numel(),
            mine=mine.numel(),
            found_dtype=found.dtype,
            dtype=mine.dtype,
        )


def misfit(
    codec: UnitCodec,
    key: str,
    where: str,
    value: Any,
    form: Form,
    *,
    any_shape: bool = False,
) -> Iterator[str]:
    """Describes the problem of a value that a state dict has for the parameter ``key``. Nothing is communicated.

    Args:
        codec: the unit of the parameter.
        key: its key.
        where: the name of the value in the message.
        value: the parameter's value, or an optimizer state with a value per element.
        form: the form of the dict.
        any_shape: whether the shape of the value may differ from that of the parameter.
    """
    shape = tuple(codec.shapes[key])
    if not is_tensor_like(value):
        yield detail("no-tensor", key=where, type=type(value).__name__)
    elif tuple(value.size()) != shape and not any_shape:
        yield detail(
            "size-mismatch-of-unit",
            key=where,
            shape=shape,
            found=tuple(value.size()),
        )
    elif not tensors.is_sharded_like(value, codec.layout.specs[codec.keys[key]]):
        yield from misplaced_rows(
            value, where, codec.group, may_be_sharded=form.is_sharded
        )


def misplaced_rows(
    value: Any, where: str, group: Group | None, *, may_be_sharded: bool
) -> Iterator[str]:
    """Describes how the sharding of a value differs from that of this module; empty if it does not.

    Args:
        value: a value of a state dict.
        where: its name.
        group: the ranks that share it.
        may_be_sharded: whether values may be sharded; a full value is always allowed.
    """
    if not tensors.is_sharded(value):
        return
    if not may_be_sharded:
        yield detail("full-expected", where=where, type=type(value).__name__)
        return
    shape = tuple(tensors.shape_in_group(value, group))
    rows = range(shape[0] if shape else 0)
    if group is not None:
        rows = shard_range(len(rows), group.size, group.rank)
    found = tuple(tensors.on_this_rank(value).shape)
    expected = (len(rows), *shape[1:]) if shape else ()
    how = (
        f" (the DTensor is {placement_of(value)})" if isinstance(value, DTensor) else ""
    )
    if found != expected:
        yield detail("rows-shape", where=where, expected=expected, found=found, cut=how)
    elif rows and shape == tuple(value.size()) and _first_row(value) != rows.start:
        yield detail(
            "rows-start",
            where=where,
            start=rows.start,
            found=_first_row(value),
            cut=how,
        )


def all_unsharded(values: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Describes the problem if no value is sharded. ``values`` are pairs of a name and a value.

    A sharded state dict may contain some full tensors, from units that were not sharded. If all are full, the dict has
    another form.
    """
    with_rows = [
        (where, value)
        for where, value in values
        if is_tensor_like(value) and tensors.has_rows(value.size())
    ]
    if with_rows and not any(tensors.is_sharded(value) for _, value in with_rows):
        yield detail("all-full", where=with_rows[0][0])


def _first_row(value: Any) -> int:
    """The index of this rank's first row in the full tensor; the rank must have rows."""
    if isinstance(value, DTensor):
        return compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )[1][0]
    return cast(int, value.local_shards()[0].metadata.shard_offsets[0])


def placement_of(value: DTensor) -> str:
    """The ranks and the placements of a DTensor, for messages."""
    return (
        f"on ranks {value.device_mesh.mesh.tolist()} with placements {value.placements}"
    )


# ---- models of ``fully_shard`` --------------------------------------------------------------------------------------


def check_placements(
    parameters: Mapping[str, Any], given: Mapping[str, DTensor], *, assigns: bool
) -> None:
    """Checks that the DTensors ``given`` can be loaded into the sharded ``parameters``.

    Raises:
        RuntimeError: a value is on other ranks, or parameters are on the meta device. With ``assigns``, which is
            ``assign=True``, they may be there, but the placements must be equal.
    """
    for key, value in given.items():
        parameter = parameters[key]
        # A copy redistributes over the same ranks; with `assign=True` the tensor replaces the parameter unchanged.
        if value.device_mesh != parameter.device_mesh or (
            assigns and value.placements != parameter.placements
        ):
            expected, found = (
                f"shape {tuple(tensor.shape)} {placement_of(tensor)}"
                for tensor in (parameter, value)
            )
            raise RuntimeError(
                message("load-other-cut", key=key, expected=expected, found=found)
            )
    on_meta = [repr(key) for key, parameter in parameters.items() if parameter.is_meta]
    if on_meta and not assigns:
        raise RuntimeError(message("load-into-meta", parameters=some(on_meta, 3)))


def check_full_tensors(given: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
    """Checks that values which are no DTensors can be loaded into sharded parameters.

    Args:
        given: these values by key.
        shown: by key, what the modules had before the model was resharded. After an evaluation the root is unsharded,
            and PyTorch's functions then pass full tensors for it.

    Raises:
        RuntimeError: a value is not a tensor, or the modules had a DTensor and ``TORCH_DISTRIBUTED_DEBUG`` is not
            ``DETAIL``.
    """
    is_detailed = get_debug_level() == DebugLevel.DETAIL
    if refused := [
        repr(key)
        for key, value in given.items()
        if not isinstance(value, torch.Tensor)
        or (isinstance(shown[key], DTensor) and not is_detailed)
    ]:
        raise RuntimeError(message("load-whole", tensors=some(refused, 3)))
