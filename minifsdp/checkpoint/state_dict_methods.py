"""The methods of a wrapper that save and load the model's state.

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
from typing import Any

from torch import nn

from minifsdp.checkpoint import agreement, custom_state, names, shared_tensors, state_dict
from minifsdp.checkpoint.codec import Form, UnitCodec
from minifsdp.checkpoint.state_dict_check import is_hidden, refuse_misfit
from minifsdp.checkpoint.state_dict_load import Reading, drop_own_tensors
from minifsdp.checkpoint.state_dict_options import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    common_settings,
    settings_for,
)
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, rank_of_this_process
from minifsdp.fsdp1.wrapper import PREFIX, Wrapper, clean_name


def _modules_of(wrapper: Wrapper) -> list[nn.Module]:
    """The wrapper, and the modules of its unit."""
    return [wrapper, *(m for _, m in wrapper._own_modules())]


def _is_shown(wrapper: Wrapper) -> bool:
    # The user has unsharded the parameters already: nothing is all-gathered, and one rank may call it alone.
    if is_hidden(wrapper):
        raise RuntimeError(message("state-dict-hidden", unit=wrapper._unit and wrapper._unit.name))
    return wrapper._unit is not None and wrapper._unit.layout.is_summoned


def wrappers_in(module: nn.Module) -> list[StateDictMethods]:
    """All wrappers in ``module``, including ``module`` itself."""
    return [inner for inner in module.modules() if isinstance(inner, StateDictMethods)]


def _named_wrappers(module: nn.Module) -> list[tuple[str, StateDictMethods]]:
    named = module.named_modules(remove_duplicate=False)
    return [(path, inner) for path, inner in named if isinstance(inner, StateDictMethods)]


class StateDictMethods(Wrapper):
    """Choosing the form of the model's state, and saving and loading it."""

    _reads_strictly = False
    _reading: Reading
    _is_looked_at = False
    _before: Mapping[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state_dict_settings = StateDictSettings()
        self._while_read = contextlib.ExitStack()
        self._register_state_dict_hook(self._after_write)  # type: ignore[no-untyped-call]
        self._register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(self._after_load)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state in the chosen form, full by default (SD-FULL, SD-SHARD, SD-LOCAL). Every rank must call it.

        Takes the arguments of ``nn.Module.state_dict``. The form is set by `set_state_dict_type` or `state_dict_type`.
        The dict does not change when training continues. Only with ``keep_vars=True``, buffers, and parameters that
        belong to no unit, are the model's own tensors.
        """
        self._mend()
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        prefix = given.get("prefix", "")
        # Another model may have been saved to the same dict.
        self._before = dict(given.get("destination") or {}) if self._is_outermost_here(prefix) else {}
        if self._is_outermost_here(prefix):
            gathered = [w for w in wrappers_in(self) if not (w._form.is_local or _is_shown(w))]
            self._meet(
                "state_dict()", [MeshGroups(w.mesh.shard, None) for w in gathered], custom_state.writes_by_itself
            )
        with state_dict.shown_to_walk(self._unit, is_looked_at=self._is_looked_at):
            state: dict[str, Any] = super().state_dict(*args, **kwargs)
            if self._is_outermost_here(prefix) and not given.get("keep_vars"):
                shards = [w._unit.layout.local_values() for w in wrappers_in(self) if w._unit is not None]
                own = [*shards, *self.parameters(), *self.buffers()]
                shared_tensors.keep_apart(state, prefix, own, self._before)
        self._before = {}
        return state

    def _meet(self, call: str, meshes: Iterable[MeshGroups], looks: Callable[[nn.Module], bool]) -> None:
        """Waits for all ranks, and notes which units must be unsharded: on all of a unit's ranks or on none.

        A user may have a hook on one rank only.

        Args:
            call: the call that all ranks must make.
            meshes: the ranks to wait for.
            looks: whether a module has custom code, or a user's hooks, that runs in the meantime.
        """
        wrappers = wrappers_in(self)
        # Custom code gets no values of a local dict.
        mine = [not self._form.is_local and any(map(looks, _modules_of(wrapper))) for wrapper in wrappers]
        groups = agreement.monitored_barrier(agreement.groups_of(meshes), call, raises_hand=any(mine))
        told = agreement.tell(groups, mine)
        for number, wrapper in enumerate(wrappers):
            group = wrapper.mesh.shard
            ranks = [rank_of_this_process()] if group is None else group.ranks
            # In a simulation, one process runs all ranks, and only its own value exists.
            wrapper._is_looked_at = any(told[rank][number] for rank in ranks if rank in told)

    def _after_write(self, _: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        inner = prefix + PREFIX
        form = self._form
        if self._unit is not None:
            state_dict.write_unit(UnitCodec(self, inner), form, state)
        state_dict.write_rest(self, form, state, inner)
        names.rename(state, inner, prefix)
        names.add_plain_names(getattr(state, "_metadata", {}), prefix)
        if not self._drops:
            return
        kept = tuple(prefix + names.dotted(path) for path, w in _named_wrappers(self) if not w._drops)
        for key in names.keys_below(state, prefix):
            if not key.startswith(kept) and state[key] is not self._before.get(key):
                del state[key]

    @property
    def _drops(self) -> bool:
        """Whether this rank gets no entries, because only the first rank gets them."""
        return self._form.first_only and not self.mesh.is_first

    def _is_outermost_here(self, prefix: str) -> bool:
        # A part of a wrapped model can be saved and loaded alone; then no wrapper's name is in the prefix.
        return not self._is_inner or PREFIX not in prefix

    @property
    def _form(self) -> Form:
        chosen = self._state_dict_settings
        return Form.of(chosen.state_dict_type, chosen.state_dict_config)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state in the chosen form (SD-FULL-08, SD-SHARD-03, SD-LOCAL-03). Every rank must call it.

        Args:
            state_dict: with plain names; in the full form, every rank needs the complete dict.
            strict: whether missing and unexpected keys are errors.
            assign: for tensors that belong to no unit, as in ``nn.Module``.

        Raises:
            RuntimeError: the dict of any rank does not fit; on all ranks, and nothing has changed.
        """
        self._reads_strictly = strict
        if getattr(state_dict, "_metadata", None):
            state_dict = names.with_versions(state_dict, self)
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._reads_strictly = False
            for wrapper in wrappers_in(self):
                wrapper._while_read.close()

    def _before_load(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._mend()
        if self._is_outermost_here(prefix):
            drop_own_tensors(self, state, prefix)
            self._meet("load_state_dict()", [w.mesh for w in wrappers_in(self)], custom_state.looks_while_read)
            # If a plain module contains this one, `strict` is unknown here, and that module checks the keys itself.
            refuse_misfit(self, self._form, state, prefix, strict=self._reads_strictly)
        names.rename(state, prefix, prefix + PREFIX)
        self._while_read.close()
        if self._unit is not None and self._is_looked_at and not (self._form.is_local or _is_shown(self)):
            self._while_read.enter_context(custom_state.full_parameters(self._unit, writeback=True))
        self._reading = Reading(self, prefix + PREFIX, self._form)
        self._reading.before_walk(state)

    def _after_load(self, _: nn.Module, incompatible: Any) -> None:
        self._while_read.close()
        self._reading.after_walk(incompatible.missing_keys, incompatible.unexpected_keys)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Sets the form for all units below ``module``; returns the previous one (SD-CFG-02 to 07).

        Raises:
            RuntimeError: a configuration belongs to another type.
            AssertionError: the units had different forms before.
        """
        settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDictMethods.get_state_dict_type(module)
        for wrapper in wrappers_in(module):
            wrapper._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The form of all units below ``module`` (SD-CFG-09).

        Raises:
            AssertionError: the units have different forms.
        """
        return common_settings([(clean_name(path), w._state_dict_settings) for path, w in _named_wrappers(module)])

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None]:
        """`set_state_dict_type` for the duration of a ``with`` block (SD-CFG-08)."""
        before = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in wrappers_in(module):
                wrapper._state_dict_settings = before
