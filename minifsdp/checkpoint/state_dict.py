"""Saving the model's state: full, sharded, local.

``nn.Module.state_dict()`` walks over the tree and saves the registered tensors of every module. In a wrapped tree these
are shards under the name ``_flat_param``. So each wrapper replaces the entries of its own unit during the walk, right
after its own part of the tree::

    before the walk     placeholders are registered under the original names, so that keys have the usual order
    after the walk      full: the unit is all-gathered, each placeholder replaced by a copy of the full value, and the
                        bucket freed; sharded: the same with this rank's rows; local: one entry, the local shard
    and                 the wrapper's prefix is removed from all names

All of this happens in the first hook of the wrapper, so the user's own hooks on a wrapper get the finished dict. The
outermost wrapper copies the other tensors, such as buffers, so that the dict does not change when training continues.

*Custom code.* A module can override ``_save_to_state_dict``, for instance to save a transposed weight, or have a hook.
Such code is written for a plain module and computes with values, so it must not get a shard or a placeholder. Its unit
is unsharded *during* the walk, as in ``summon_full_params``. This needs more memory, because an outer unit stays
unsharded while inner ones are saved; without custom code, at most one unit at a time is unsharded. All ranks must
unshard the same units, so they exchange the list of units with custom code.

The user may also call ``state_dict()`` inside ``summon_full_params``. Then modules already have full parameters,
nothing is communicated, and one rank may call it alone.

Loading is in ``state_dict_load.py``.

*In torch:* ``_state_dict_utils.py``, 932 lines of hooks in three families. Every unit is unsharded during the walk.

Spec: SD-FULL, SD-SHARD, SD-LOCAL, MP-04, MP-10, IGN-08, NAMES-10, SUMMON-02, SUMMON-07, SAVE-02, SAVE-03.
"""

from collections.abc import Callable, Generator, Iterable, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.cases import parts_of_units
from minifsdp.checkpoint.codec import UnitCodec, dotted, plain_path, rename
from minifsdp.checkpoint.state_dict_options import Form, named_wrappers, state_of
from minifsdp.checkpoint.tensors import copy_shared, memory_of
from minifsdp.checks import agreement
from minifsdp.engine.events import events
from minifsdp.engine.exchange import exchange, groups_of
from minifsdp.engine.layout import ParamInfo
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, rank_of_this_process
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.full_params import all_gather_unit, check_idle, summoned
from minifsdp.fsdp1.wrapper import PREFIX, Wrapper, is_wrapper, units_in


def save(
    wrapper: Wrapper, walk: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The wrapper's state in the chosen form. Every rank must call it.

    Args:
        wrapper: the outermost one, or an inner one during the walk.
        walk: its ``nn.Module.state_dict``.
        *args, **kwargs: the arguments of ``nn.Module.state_dict``.
    """
    wrapper._recover_after_error()
    given = kwargs | dict(
        zip(("destination", "prefix", "keep_vars"), args, strict=False)
    )
    prefix = given.get("prefix", "")
    kept = state_of(wrapper)
    is_outermost = is_outermost_here(wrapper, prefix)
    if is_outermost:
        # Another model may have been saved to the same dict.
        kept.before = dict(given.get("destination") or {})
        gathered = [
            w
            for w in Wrapper.fsdp_modules(wrapper)
            if not (state_of(w).form.is_local or is_summoned(w))
        ]
        agree(
            wrapper,
            [MeshGroups(w._mesh.shard, None) for w in gathered],
            "state_dict()",
            saves_itself,
        )
    with _registered_during_walk(wrapper._unit, runs_custom_code=kept.runs_custom_code):
        state = walk(*args, **kwargs)
        if is_outermost and not given.get("keep_vars"):
            units = units_in(wrapper)
            own = [*wrapper.parameters(), *wrapper.buffers()]
            keys = [
                key
                for key in state
                if key.startswith(prefix) and state[key] is not kept.before.get(key)
            ]
            of_model = [*own, *(unit.layout.local_values() for unit in units)]
            wrapper._share_until_forward(
                copy_shared(state, keys, of_model, _unchanged_until_forward(units, own))
            )
    kept.before = {}
    return state


def _unchanged_until_forward(
    units: Iterable[FlatUnit], tensors: Iterable[Tensor]
) -> set[int | None]:
    """Memory of buffers and ignored parameters that neither a backward nor an optimizer changes before a forward.

    Returns none between a forward and its backward, because a recomputed module changes its buffers in backward.
    """
    if any(unit.phase is not Phase.IDLE or unit.uses.awaits_backward for unit in units):
        return set()
    managed = {None, *(memory_of(unit.layout.local_values()) for unit in units)}
    # On the CPU, another process can write to shared memory.
    return {
        memory_of(one)
        for one in tensors
        if one.is_leaf
        and one.grad is None
        and memory_of(one) not in managed
        and (one.device.type != "cpu" or not one.is_shared())
    }


def agree(
    wrapper: Wrapper,
    meshes: Iterable[MeshGroups],
    call: str,
    has_code: Callable[[nn.Module], bool],
) -> None:
    """Waits for all ranks, and stores for each unit whether it must be unsharded, the same on all of the unit's ranks.

    The ranks may differ before, because a user may have a hook on one rank only.

    Args:
        wrapper: the outermost one.
        meshes: the ranks to wait for.
        call: the call that all ranks must make.
        has_code: whether custom code of a module runs during this call.
    """
    wrappers = Wrapper.fsdp_modules(wrapper)
    # Custom code gets no values of a local dict.
    mine = [
        not state_of(inner).form.is_local
        and any(map(has_code, [inner, *(m for _, m in inner._own_modules())]))
        for inner in wrappers
    ]
    # Ranks may have different numbers of units over other groups.
    how = " ".join(sorted({state_of(inner).form.type.name for inner in wrappers}))
    groups = agreement.monitored_barrier(
        groups_of(meshes), call, has_facts=any(mine), how=how
    )
    reported = exchange(groups, mine)
    for number, inner in enumerate(wrappers):
        group = inner._mesh.shard
        ranks = [rank_of_this_process()] if group is None else group.ranks
        # In a simulation, one process runs all ranks, and only its own value exists.
        state_of(inner).runs_custom_code = any(
            reported[rank][number] for rank in ranks if rank in reported
        )


def is_outermost_here(wrapper: Wrapper, prefix: str) -> bool:
    """Whether no other wrapper contains this one, in the tree or in the submodule that the user saves."""
    return not wrapper._is_inner or PREFIX not in prefix


def is_hidden(wrapper: Wrapper) -> bool:
    """Whether `summon_full_params` with ``rank0_only`` is active and this rank has no full parameters."""
    unit = wrapper._unit
    return (
        unit is not None
        and unit.phase is Phase.SUMMONED
        and not unit.layout.is_summoned
    )


def is_summoned(wrapper: Wrapper) -> bool:
    """Whether the user has unsharded the parameters. Then nothing is all-gathered, and one rank may save alone."""
    if is_hidden(wrapper):
        raise RuntimeError(
            message("state-dict-hidden", unit=wrapper._unit and wrapper._unit.name)
        )
    return wrapper._unit is not None and wrapper._unit.layout.is_summoned


# ---- during the walk ------------------------------------------------------------------------------------------------


@contextmanager
def _registered_during_walk(
    unit: FlatUnit | None, *, runs_custom_code: bool
) -> Generator[None]:
    """Registers a tensor under each original name. All ranks of the unit's mesh must enter and exit."""
    if unit is None or unit.layout.is_summoned:
        yield
    elif runs_custom_code:
        with full_parameters(unit, writeback=False):
            yield
    else:
        check_idle(unit)
        # Empty tensors for hidden original parameters, so that the walk writes keys in their order.
        hidden = [] if unit.layout.use_orig_params else _places_of(unit)
        for place in hidden:
            empty = unit.layout.local_values().new_empty(0)
            place.module._parameters[place.name] = nn.Parameter(
                empty, requires_grad=False
            )
        try:
            yield
        finally:
            for place in hidden:
                del place.module._parameters[place.name]


@contextmanager
def full_parameters(unit: FlatUnit, *, writeback: bool) -> Generator[None]:
    """Full parameters on the modules of an idle unit. All ranks of its shard group must enter and exit it."""
    with summoned([unit], writeback=writeback):
        shown = [
            (place, place.module.get_parameter(place.name))
            for place in _places_of(unit)
        ]
        try:
            yield
        finally:
            for place, parameter in shown:
                given = place.module._parameters.get(place.name)
                if given is not None and given is not parameter:
                    # `load_state_dict(assign=True)` has registered another tensor.
                    parameter.data.copy_(given)
                    place.module._parameters[place.name] = parameter


def _places_of(unit: FlatUnit) -> list[ParamInfo]:
    """Every place where a parameter of the unit is registered."""
    return [place for info in unit.layout.param_infos for place in info.places]


# ---- after the walk -------------------------------------------------------------------------------------------------


def after_walk(
    wrapper: Wrapper, state: MutableMapping[str, Any], prefix: str, metadata: Any
) -> None:
    """The first hook of a wrapper after the walk: writes the unit's values, and the names of the plain module."""
    inner = prefix + PREFIX
    form = state_of(wrapper).form
    if wrapper._unit is not None:
        _write_unit(UnitCodec(wrapper, inner), form, state)
    _write_buffers(wrapper, form, state, inner)
    rename(state, inner, prefix)
    # Versions of modules are saved by path. The paths are kept, because a plain module around wrappers loads by path.
    versions = getattr(state, "_metadata", {})
    for path in [path for path in versions if (path + ".").startswith(inner)]:
        versions[plain_path(path + ".").removesuffix(".")] = versions[path]
    if _drops_entries(wrapper):
        others = tuple(
            prefix + dotted(path)
            for path, w in named_wrappers(wrapper)
            if not _drops_entries(w)
        )
        before = state_of(wrapper).before
        for key in [
            key
            for key in state
            if key.startswith(prefix) and not key.startswith(others)
        ]:
            if state[key] is not before.get(key):
                del state[key]


def _drops_entries(wrapper: Wrapper) -> bool:
    """Whether this rank gets no entries, because only the first rank gets them."""
    return state_of(wrapper).form.first_only and not wrapper._mesh.is_first


def _write_unit(codec: UnitCodec, form: Form, state: MutableMapping[str, Any]) -> None:
    """Replaces the placeholders in ``state`` by the unit's values. All ranks of the unit's mesh must call it."""
    state.pop(codec.flat_key, None)
    is_wanted = codec.mesh.is_first or not form.first_only
    if form.is_local:
        for key in codec.keys:
            state.pop(key, None)
        state[codec.local_key] = codec.local_shard(form)
    elif not codec.layout.is_summoned:
        layout = codec.layout
        group = codec.group
        recorder = events.recorder
        if recorder is not None and group is not None:
            recorder.begin(
                "AG",
                codec.unit.name,
                num_bytes=layout.num_bytes,
                ranks=group.ranks,
                stream="gather",
            )
        full_values = layout.views_of(all_gather_unit(codec.unit))
        if is_wanted:
            values = [codec.in_form(full, form, full.device) for full in full_values]
            state.update({key: values[number] for key, number in codec.keys.items()})
        if recorder is not None and group is not None:
            recorder.freed(codec.unit)
    elif is_wanted:
        # The walk has written real values, and custom code may have changed them.
        for key in [
            key for key in codec.keys if isinstance(state.get(key), torch.Tensor)
        ]:
            state[key] = codec.in_form(state[key].detach(), form, state[key].device)
        # This includes entries under other names, because a view of one element would keep, and save, the whole bucket.
        keys = [key for key in state if key.startswith(codec.prefix)]
        copy_shared(state, keys, codec.unit.modules[0].parameters())


def _write_buffers(
    wrapper: Wrapper, form: Form, state: MutableMapping[str, Any], prefix: str
) -> None:
    """Converts the buffers of the wrapper's own modules to the dtype that the user gave them. Skips ignored modules.

    A local dict keeps the compute dtype, because it is only for the same run (MP-10).
    """
    for path, module in wrapper._own_modules():
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            key = prefix + dotted(path) + name
            if (value := state.get(key)) is not None:
                dtype = (
                    value.dtype
                    if form.is_local
                    else wrapper._buffer_dtypes.get((module, name), value.dtype)
                )
                state[key] = value.to("cpu" if form.offload else value.device, dtype)


# ---- custom code ----------------------------------------------------------------------------------------------------


def saves_itself(module: nn.Module) -> bool:
    """Whether custom code of the module, or a hook of the user, affects the result of ``state_dict()``."""
    if is_wrapper(module):
        # Hooks that run after the wrapper's own hook get the finished dict.
        return bool(module._state_dict_pre_hooks)
    num_hooks = parts_of_units.num_of_user(module._state_dict_pre_hooks.values()) + len(
        module._state_dict_hooks
    )
    return _is_custom(
        module, num_hooks, "state_dict", "_save_to_state_dict", "get_extra_state"
    )


def loads_itself(module: nn.Module) -> bool:
    """Whether custom code of the module, or a hook of the user, decides which keys ``load_state_dict()`` loads."""
    # The wrapper itself has registered one of its hooks.
    num_hooks = parts_of_units.num_of_user(
        module._load_state_dict_pre_hooks.values()
    ) - is_wrapper(module)
    return _is_custom(module, num_hooks, "_load_from_state_dict")


def reads_while_loaded(module: nn.Module) -> bool:
    """Whether custom code of the module runs during ``load_state_dict()`` and may read parameters."""
    return loads_itself(module) or _is_custom(module, 0, "set_extra_state")


def _is_custom(module: nn.Module, num_hooks: int, *methods: str) -> bool:
    """Whether a module has hooks or overrides a method."""
    # The hooks of an activation checkpoint remove its name from keys, and add it again.
    if num_hooks and not hasattr(module, "_checkpoint_wrapped_module"):
        return True
    # A batch norm has custom code for its counter, which is not a parameter.
    return any(
        getattr(type(module), m)
        not in (getattr(nn.Module, m), getattr(nn.BatchNorm1d, m))
        for m in methods
    )
