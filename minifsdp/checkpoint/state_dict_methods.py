"""The functions behind the methods of a wrapper that save and load the model's state.

They choose the form and call ``state_dict.py`` and ``state_dict_load.py``. Worked example: with ``FULL_STATE_DICT`` on
two ranks every wrapper, inner ones first, replaces its unit's entry in the dict, a shard, by the all-gathered tensors
under their plain names.

The outermost wrapper handles the steps that are needed once per tree. Before saving and before loading, it synchronizes
with the other ranks: all must be present, and a rank with custom code in a unit reports it, because all ranks must then
unshard that unit.

*In torch:* six functions for each of three types, found by name in a table, and registered as hooks.

Spec: SD-CFG, SD-FULL, SD-SHARD, SD-LOCAL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from minifsdp.checkpoint import agreement, custom_state, names, shared_tensors, state_dict
from minifsdp.checkpoint.codec import Form, UnitCodec
from minifsdp.checkpoint.state_dict_check import is_hidden, refuse_misfit
from minifsdp.checkpoint.state_dict_load import Reading, drop_own_tensors
from minifsdp.checkpoint.state_dict_options import (
    StateDictSettings,
    StateDictType,
    common_settings,
    settings_for,
)
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, rank_of_this_process
from minifsdp.fsdp1.wrapper import PREFIX, Wrapper, clean_name


def _is_shown(wrapper: Wrapper) -> bool:
    # The user has unsharded the parameters already: nothing is all-gathered, and one rank may call it alone.
    if is_hidden(wrapper):
        raise RuntimeError(message("state-dict-hidden", unit=wrapper._unit and wrapper._unit.name))
    return wrapper._unit is not None and wrapper._unit.layout.is_summoned


@dataclass
class StateDictState:
    """The values that a wrapper stores for its state dict.

    Attributes:
        settings: the chosen type and its configurations.
        before: saving: the entries that the dict had before.
        is_strict: loading: whether missing and unexpected keys are errors.
        runs_custom_code: whether custom code in the unit gets its parameters during the walk.
        unsharded: loading: the parameters that are unsharded during the walk.
        reading: loading: what the wrapper does before and after the walk.
    """

    settings: StateDictSettings = field(default_factory=StateDictSettings)
    before: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False
    runs_custom_code: bool = False
    unsharded: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    reading: Reading | None = None

    @property
    def form(self) -> Form:
        """The form of the model's state."""
        return Form.of(self.settings.state_dict_type, self.settings.state_dict_config)


def state_of(wrapper: Wrapper) -> StateDictState:
    """The values that a wrapper stores in ``_state_dict_state``."""
    state: StateDictState = vars(wrapper)["_state_dict_state"]
    return state


def register_hooks(wrapper: Wrapper) -> None:
    """Registers the hooks of a wrapper for ``state_dict`` and ``load_state_dict``."""
    wrapper.register_state_dict_post_hook(_after_write)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


def _named_wrappers(module: nn.Module) -> list[tuple[str, Wrapper]]:
    named = module.named_modules(remove_duplicate=False)
    return [(path, inner) for path, inner in named if isinstance(inner, Wrapper)]


def save(wrapper: Wrapper, walk: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The wrapper's state in the chosen form. Every rank must call it.

    Args:
        wrapper: the outermost one, or an inner one during the walk.
        walk: its ``nn.Module.state_dict``.
        *args, **kwargs: the arguments of ``nn.Module.state_dict``.
    """
    wrapper._mend()
    given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
    prefix, kept, inside = given.get("prefix", ""), state_of(wrapper), Wrapper.fsdp_modules(wrapper)
    is_outermost = _is_outermost_here(wrapper, prefix)
    # Another model may have been saved to the same dict.
    kept.before = dict(given.get("destination") or {}) if is_outermost else {}
    if is_outermost:
        gathered = [w for w in inside if not (state_of(w).form.is_local or _is_shown(w))]
        _meet(
            wrapper, "state_dict()", [MeshGroups(w.mesh.shard, None) for w in gathered], custom_state.writes_by_itself
        )
    with state_dict.shown_to_walk(wrapper._unit, is_looked_at=kept.runs_custom_code):
        state = walk(*args, **kwargs)
        if is_outermost and not given.get("keep_vars"):
            shards = [w._unit.layout.local_values() for w in inside if w._unit is not None]
            own = [*shards, *wrapper.parameters(), *wrapper.buffers()]
            shared_tensors.keep_apart(state, prefix, own, kept.before)
    kept.before = {}
    return state


def _meet(wrapper: Wrapper, call: str, meshes: Iterable[MeshGroups], looks: Callable[[nn.Module], bool]) -> None:
    """Waits for all ranks, and notes which units must be unsharded: on all of a unit's ranks or on none.

    A user may have a hook on one rank only.

    Args:
        wrapper: the outermost one.
        call: the call that all ranks must make.
        meshes: the ranks to wait for.
        looks: whether a module has custom code, or a user's hooks, that runs in the meantime.
    """
    wrappers = Wrapper.fsdp_modules(wrapper)
    # Custom code gets no values of a local dict.
    is_local = state_of(wrapper).form.is_local
    mine = [not is_local and any(map(looks, [w, *(m for _, m in w._own_modules())])) for w in wrappers]
    groups = agreement.monitored_barrier(agreement.groups_of(meshes), call, raises_hand=any(mine))
    told = agreement.tell(groups, mine)
    for number, inner in enumerate(wrappers):
        group = inner.mesh.shard
        ranks = [rank_of_this_process()] if group is None else group.ranks
        # In a simulation, one process runs all ranks, and only its own value exists.
        state_of(inner).runs_custom_code = any(told[rank][number] for rank in ranks if rank in told)


def _after_write(wrapper: Wrapper, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    inner = prefix + PREFIX
    form = state_of(wrapper).form
    if wrapper._unit is not None:
        state_dict.write_unit(UnitCodec(wrapper, inner), form, state)
    state_dict.write_rest(wrapper, form, state, inner)
    names.rename(state, inner, prefix)
    names.add_plain_names(getattr(state, "_metadata", {}), prefix)
    if not _drops(wrapper):
        return
    kept = tuple(prefix + names.dotted(path) for path, w in _named_wrappers(wrapper) if not _drops(w))
    before = state_of(wrapper).before
    for key in names.keys_below(state, prefix):
        if not key.startswith(kept) and state[key] is not before.get(key):
            del state[key]


def _drops(wrapper: Wrapper) -> bool:
    """Whether this rank gets no entries, because only the first rank gets them."""
    return state_of(wrapper).form.first_only and not wrapper.mesh.is_first


def _is_outermost_here(wrapper: Wrapper, prefix: str) -> bool:
    # A part of a wrapped model can be saved and loaded alone; then no wrapper's name is in the prefix.
    return not wrapper._is_inner or PREFIX not in prefix


def load(wrapper: Wrapper, walk: Callable[..., Any], state: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Loads a state in the chosen form. Every rank must call it.

    Args:
        wrapper: the wrapper.
        walk: its ``nn.Module.load_state_dict``.
        state: the dict, with plain names.
        strict: whether missing and unexpected keys are errors.
        assign: for tensors that belong to no unit, as in ``nn.Module``.

    Raises:
        RuntimeError: the dict of any rank does not fit; on all ranks, and nothing has changed.
    """
    state_of(wrapper).is_strict = strict
    if getattr(state, "_metadata", None):
        state = names.with_versions(state, wrapper)
    try:
        return walk(state, strict, assign)
    finally:
        state_of(wrapper).is_strict = False
        for inner in Wrapper.fsdp_modules(wrapper):
            state_of(inner).unsharded.close()


def _before_load(wrapper: Wrapper, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    wrapper._mend()
    kept, form = state_of(wrapper), state_of(wrapper).form
    if _is_outermost_here(wrapper, prefix):
        drop_own_tensors(wrapper, state, prefix)
        meshes = [w.mesh for w in Wrapper.fsdp_modules(wrapper)]
        _meet(wrapper, "load_state_dict()", meshes, custom_state.looks_while_read)
        # If a plain module contains this one, `strict` is unknown here, and that module checks the keys itself.
        refuse_misfit(wrapper, form, state, prefix, strict=kept.is_strict)
    names.rename(state, prefix, prefix + PREFIX)
    kept.unsharded.close()
    if wrapper._unit is not None and kept.runs_custom_code and not (form.is_local or _is_shown(wrapper)):
        kept.unsharded.enter_context(custom_state.full_parameters(wrapper._unit, writeback=True))
    kept.reading = Reading(wrapper, prefix + PREFIX, form)
    kept.reading.before_walk(state)


def _after_load(wrapper: Wrapper, incompatible: Any) -> None:
    kept = state_of(wrapper)
    kept.unsharded.close()
    if kept.reading is not None:
        kept.reading.after_walk(incompatible.missing_keys, incompatible.unexpected_keys)


def set_type(module: nn.Module, state_dict_type: StateDictType, *configs: Any) -> StateDictSettings:
    """Sets the form for all units in ``module``; returns the previous one. Raises the errors of both functions."""
    settings, before = settings_for(state_dict_type, *configs), get_type(module)
    for wrapper in Wrapper.fsdp_modules(module):
        state_of(wrapper).settings = settings
    return before


def get_type(module: nn.Module) -> StateDictSettings:
    """The common settings of all units in ``module``.

    Raises:
        AssertionError: two units differ.
    """
    return common_settings([(clean_name(path), state_of(w).settings) for path, w in _named_wrappers(module)])


@contextlib.contextmanager
def type_in_block(module: nn.Module, state_dict_type: StateDictType, *configs: Any) -> Generator[None]:
    """`set_type` for the duration of a ``with`` block."""
    before = set_type(module, state_dict_type, *configs)
    try:
        yield
    finally:
        for wrapper in Wrapper.fsdp_modules(module):
            state_of(wrapper).settings = before
