"""Loading the model's state: full, sharded, local. No rank loads it if the dict of any rank does not fit.

``nn.Module.load_state_dict()`` walks over the tree and copies the values under each module's name into the module. In a
wrapped tree the modules have no such parameters. So each wrapper removes its unit's values from the dict *before* the
walk, and copies this rank's shard of each. A full dict needs no communication, because each rank has all values.
Afterwards the wrapper corrects the lists of missing and unexpected keys, and their names.

The walk finds a missing key only after it has overwritten a part of the model. Also, the rows of a sharded dict are
all-gathered, so if one rank stops there, the others wait. Therefore the outermost wrapper checks the whole dict first,
and the ranks compare their problems. ``checks/state_dicts.py`` contains these checks. Worked example, two ranks, rank 1
has read a damaged file::

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
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from minifsdp.checkpoint import state_dict, tensors
from minifsdp.checkpoint.codec import UnitCodec, dotted, plain_path, rename
from minifsdp.checkpoint.state_dict_options import Form, StateDictState, state_of
from minifsdp.checks import state_dicts
from minifsdp.engine.flat_params import FLAT_NAME
from minifsdp.fsdp1.full_params import check_idle
from minifsdp.fsdp1.wrapper import PREFIX, Wrapper, units_in


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
        state_dicts.refuse_misfit(wrapper, form, state, prefix, strict=kept.is_strict)
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
    state_dicts.refuse_values(codec, given, form)
    return codec.copy_into(codec.layout.local_values().clone(), given)


def after_walk(wrapper: Wrapper, incompatible: Any) -> None:
    """The hook after the walk. Corrects the lists of keys: removes loaded keys, and converts names to plain names."""
    kept = state_of(wrapper)
    kept.unsharded.close()
    # The lists are for the whole tree, and inner wrappers have already converted names, so plain names are compared.
    own = {plain_path(key): has_value for key, has_value in kept.own_keys.items()}
    incompatible.missing_keys[:] = [
        *(
            name
            for name in map(plain_path, incompatible.missing_keys)
            if name not in own
        ),
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
        for info in layout.param_infos
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
