"""The methods of a wrapper that write and read the model's state.

They choose; the work is in ``state_dict.py``. Worked example: with ``FULL_STATE_DICT`` on two ranks every wrapper,
inner ones first, replaces what its unit wrote into the dict, a slice, by the gathered tensors under their plain names.

*In torch:* six functions for each of three types, found by name in a table, and registered as hooks.

Spec: SD-CFG, SD-FULL, SD-SHARD, SD-LOCAL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.fsdp1 import build, chunks, state_dict
from minifsdp.fsdp1.base import PREFIX, WrapperBase, clean_name, is_wrapper
from minifsdp.fsdp1.state_dict_options import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    common_settings,
    settings_for,
)


class StateDictMethods(WrapperBase):
    """Choosing, writing and reading the model's state."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state in the chosen form, full by default (SD-FULL, SD-SHARD, SD-LOCAL). Every rank must call it.

        Takes what ``nn.Module.state_dict`` takes; the form is chosen by `set_state_dict_type` or `state_dict_type`.
        """
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        with state_dict.place_holders(self._unit):
            state: dict[str, Any] = super().state_dict(*args, **kwargs)
        inner = prefix + PREFIX
        if self._unit is not None:
            mesh = self._state_dict_mesh()
            state_dict.write_unit(self._unit, self.module, self._state_dict_settings, state, inner, mesh)
        modules = build.modules_of_unit(self.module, is_wrapper, self._ignored_modules)
        state_dict.write_rest(modules, self._buffer_dtypes, self._state_dict_settings, state, inner)
        state_dict.rename(state, inner, prefix)
        if getattr(self._state_dict_settings.state_dict_config, "rank0_only", False) and not self.mesh.is_first:
            state_dict.drop(state, prefix)
        return state

    def _state_dict_mesh(self) -> DeviceMesh | None:
        config, group = self._state_dict_settings.state_dict_config, self.mesh.shard
        if group is None or config is None:
            return None
        return chunks.device_mesh_for(self.device_mesh, group, self.compute_device, config.use_dtensor)

    def _before_load(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        state_dict.rename(state, prefix, prefix + PREFIX)
        self._reading = state_dict.Reading(self._unit, self.module, self._state_dict_settings)
        self._reading.before_walk(state, prefix + PREFIX, errors)

    def _after_load(self, _: nn.Module, incompatible: Any) -> None:
        self._reading.after_walk(incompatible.missing_keys, incompatible.unexpected_keys)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Chooses the form for all units below ``module``; returns what was chosen before (SD-CFG-02 to 07).

        Raises:
            RuntimeError: a configuration belongs to another type.
            AssertionError: the units differed before.
        """
        settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDictMethods.get_state_dict_type(module)
        for wrapper in WrapperBase.fsdp_modules(module):
            wrapper._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The form that is chosen for all units below ``module`` (SD-CFG-09).

        Raises:
            AssertionError: they differ.
        """
        wrappers = [(n, m) for n, m in module.named_modules() if isinstance(m, WrapperBase)]
        return common_settings([(clean_name(name), wrapper._state_dict_settings) for name, wrapper in wrappers])

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None]:
        """`set_state_dict_type` for the time of a ``with`` block (SD-CFG-08)."""
        before = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in WrapperBase.fsdp_modules(module):
                wrapper._state_dict_settings = before
