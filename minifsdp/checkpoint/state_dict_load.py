"""Loading the model's state: full, sharded, local. No rank loads it if the dict of any rank does not fit.

``nn.Module.load_state_dict()`` walks over the tree and copies the values under each module's name into the module. In a
wrapped tree the modules have no such parameters. So each wrapper removes its unit's values from the dict *before* the
walk, and copies this rank's shard of each. A full dict needs no communication, because each rank has all values.
Afterwards the wrapper corrects the lists of missing and unexpected keys, and their names.

The walk finds a missing key only after it has overwritten a part of the model. Also, the rows of a sharded dict are
all-gathered, so if one rank stops there, the others wait. Therefore the outermost wrapper checks the whole dict first,
and the ranks compare their problems. Worked example, two ranks, rank 1 has read a damaged file::

    rank 0 finds    nothing                                          raises, because of rank 1
    rank 1 finds    Missing key(s) in state_dict: "0.bias"           raises

The model is unchanged on both ranks.

Modules with custom loading code (``_load_from_state_dict`` overridden, or a hook that renames keys) load their values
themselves: their code may accept a missing key, or a value with another shape, so their keys are not checked. A unit
with such a module is unsharded during the walk, and its values stay in the dict. Afterwards each rank keeps its shard
of the values that the walk has loaded.

*In torch:* hooks in ``_state_dict_utils.py``. Only the rank that notices a problem raises, halfway through.

Spec: SD-FULL-08, SD-FULL-09, SD-FULL-13, SD-SHARD-03, SD-LOCAL-03, SD-LOCAL-04, NAMES-10.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy

from minifsdp.checkpoint import agreement, state_dict, tensors
from minifsdp.checkpoint.codec import UnitCodec, dotted, plain_path, rename
from minifsdp.checkpoint.state_dict_options import Form, StateDictState, state_of
from minifsdp.engine.exchange import groups_of
from minifsdp.engine.flat_params import FLAT_NAME
from minifsdp.engine.messages import detail
from minifsdp.fsdp1.full_params import check_idle
from minifsdp.fsdp1.wrapper import PREFIX, Wrapper, units_in

# The beginning of the error message of nn.Module.
OPENING = "Error(s) in loading state_dict for FullyShardedDataParallel: "

# All modules to load, each with the prefix of its keys.
_Modules = Sequence[tuple[str, nn.Module]]


def load(
    wrapper: Wrapper,
    walk: Callable[..., Any],
    state: Mapping[str, Any],
    strict: bool,
    assign: bool,
) -> Any:
    """Loads a state in the chosen form. Every rank must call it.

    Args:
        wrapper: the wrapper.
        walk: its ``nn.Module.load_state_dict``.
        state: the dict, with plain names.
        strict: whether missing and unexpected keys are errors.
        assign: as in ``nn.Module``; only for tensors that belong to no unit.

    Raises:
        StateDictMismatchError: the dict of any rank does not fit; raised on all ranks, before anything has changed.
    """
    state_of(wrapper).is_strict = strict
    if getattr(state, "_metadata", None):
        state = _with_versions(state, wrapper)
    try:
        return walk(state, strict, assign)
    finally:
        state_of(wrapper).is_strict = False
        for inner in Wrapper.fsdp_modules(wrapper):
            state_of(inner).unsharded.close()


def register_hooks(wrapper: Wrapper) -> None:
    """Registers the hooks around the walks of ``nn.Module``."""
    wrapper.register_state_dict_post_hook(state_dict.after_walk)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(before_walk)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(after_walk)  # type: ignore[no-untyped-call]


def _with_versions(state: Any, module: nn.Module) -> Mapping[str, Any]:
    """A copy of ``state`` with the version of each module under its path in ``module``, for any wrapping."""
    # A wrapper and its module have the same plain name; the module comes later and its version is kept.
    versions = {dotted(path): version for path, version in state._metadata.items()}
    paths = [
        path
        for path, _ in module.named_modules(remove_duplicate=False)
        if dotted(path) in versions
    ]
    copied = OrderedDict(state)
    copied._metadata = {path: versions[dotted(path)] for path in paths}  # type: ignore[attr-defined]
    return copied


@tensors.no_deprecation_warning()
def before_walk(
    wrapper: Wrapper, state: MutableMapping[str, Any], prefix: str, *rest: Any
) -> None:
    """The hook before the walk: checks the dict in the outermost wrapper, and loads this rank's shard of the unit.

    If modules have full parameters, the values stay in the dict, and the walk loads them. For a sharded dict, all ranks
    of the unit's mesh must call it.
    """
    wrapper._recover_after_error()
    wrapper._copy_shared_values()
    kept = state_of(wrapper)
    form = state_of(wrapper).form
    unit = wrapper._unit
    if state_dict.is_outermost_here(wrapper, prefix):
        _drop_own_tensors(wrapper, state, prefix)
        meshes = [inner._mesh for inner in Wrapper.fsdp_modules(wrapper)]
        state_dict.agree(
            wrapper, meshes, "load_state_dict()", state_dict.reads_while_loaded
        )
        # If a plain module contains this one, `strict` is unknown here, and that module checks the keys itself.
        _refuse_misfit(wrapper, form, state, prefix, strict=kept.is_strict)
        _distribute_plain_values(wrapper, state, prefix)
    rename(state, prefix, prefix + PREFIX)
    kept.unsharded.close()
    kept.own_keys = {}
    if unit is None:
        return
    if kept.runs_custom_code and not (form.is_local or state_dict.is_summoned(wrapper)):
        kept.unsharded.enter_context(state_dict.full_parameters(unit, writeback=True))
    codec = UnitCodec(wrapper, prefix + PREFIX)
    if unit.layout.is_summoned and not form.is_local:
        # Rows are all-gathered into full tensors, because a module's custom code expects full tensors.
        for key in codec.keys:
            if tensors.is_sharded(state.get(key)):
                state[key] = codec.as_parameter(key, codec.unsharded(state[key]))
        return
    check_idle(unit)
    shard = _take_shard(kept, codec, state, form)
    kept.own_keys[codec.flat_key] = True
    if shard is not None:
        unit.layout.overwrite_local(shard)


def _take_shard(
    kept: StateDictState, codec: UnitCodec, state: MutableMapping[str, Any], form: Form
) -> torch.Tensor | None:
    """Removes the unit's values from the dict. Returns this rank's shard, or ``None`` if a local dict lacks it."""
    if form.is_local:
        shard = codec.given_shard(state)
        kept.own_keys = {
            **dict.fromkeys(codec.keys, True),
            codec.local_key: shard is not None,
        }
        for key in (codec.local_key, codec.flat_key):
            state.pop(key, None)
        return shard
    kept.own_keys = {key: key in state for key in codec.keys}
    given = {key: state.pop(key) for key in codec.keys if key in state}
    # Checked again: custom code of an outer module may have changed a value.
    problems = [
        problem
        for key, value in given.items()
        for problem in codec.misfit(key, key, value, form)
    ]
    agreement.refuse_together([], problems, OPENING)
    return codec.copy_into(codec.layout.local_values().clone(), given)


def after_walk(wrapper: Wrapper, incompatible: Any) -> None:
    """The hook after the walk. Corrects the lists of keys: removes loaded keys, and converts names to plain names."""
    kept = state_of(wrapper)
    kept.unsharded.close()
    # The lists are for the whole tree, and inner wrappers have already converted names, so plain names are compared.
    own = {plain_path(key): has_value for key, has_value in kept.own_keys.items()}
    missing = [
        name for name in map(plain_path, incompatible.missing_keys) if name not in own
    ]
    incompatible.missing_keys[:] = [
        *missing,
        *(name for name, has_value in own.items() if not has_value),
    ]
    incompatible.unexpected_keys[:] = map(plain_path, incompatible.unexpected_keys)


def _drop_own_tensors(
    wrapper: Wrapper, state: MutableMapping[str, Any], prefix: str
) -> None:
    """Removes the wrapper's own shards from a dict, if they were added.

    ``set_model_state_dict`` of ``torch.distributed.checkpoint`` adds the model's registered parameters to a full dict:
    flat parameters, and each parameter that the dict lacks.
    """
    sharded = [
        unit.layout
        for unit in units_in(wrapper)
        if unit.plans[0].mesh.shard is not None
    ]
    own = {id(parameter) for layout in sharded for parameter in layout.local_parameters}
    # Between forward and backward, modules can have unsharded views.
    own |= {
        id(getattr(info.module, info.name))
        for layout in sharded
        for info in layout.parameters
    }
    for key in [key for key in state if key.startswith(prefix)]:
        is_flat = key.endswith(FLAT_NAME) and isinstance(state[key], nn.Parameter)
        if is_flat or id(state[key]) in own:
            del state[key]


def _distribute_plain_values(
    wrapper: Wrapper, state: MutableMapping[str, Any], prefix: str
) -> None:
    """Converts full values of parameters that are ``DTensor``s: tensor parallelism has sharded them, and no unit."""
    for name, parameter in wrapper.named_parameters():
        key = prefix + plain_path(name)
        value = state.get(key)
        if (
            isinstance(parameter, DTensor)
            and isinstance(value, torch.Tensor)
            and not tensors.is_sharded(value)
        ):
            state[key] = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            )


# ---- the check before the walk --------------------------------------------------------------------------------------


def _refuse_misfit(
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


def _problems(
    state: Mapping[str, Any],
    prefix: str,
    modules: _Modules,
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
            yield from codec_of[key].misfit(
                key, key, state[key], form, any_shape=is_elsewhere
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
        yield from tensors.all_unsharded((key, state[key]) for key in sharded)


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
