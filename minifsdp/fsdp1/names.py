"""Forwards names, attributes and items of a wrapper to the wrapped module.

``model.layer``, ``model[0]`` and ``model.vocab_size`` look up the wrapped module. Parameter names contain the wrappers'
prefixes, as in torch. Inside ``summon_full_params`` they are the names of the unwrapped model.

Worked example: the weight of ``FSDP(Sequential(FSDP(Linear(2, 2))))`` is named
``_fsdp_wrapped_module.0._fsdp_wrapped_module.weight``, and inside ``summon_full_params`` it is named ``0.weight``.

*In torch:* the same, spread over the wrapper class.

Spec: NAMES, FWD-08, NEW-22.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minifsdp.engine.messages import message, warn_renamed
from minifsdp.fsdp1.wrapper import PREFIX, WRAPPED, Wrapper


class NameMethods(Wrapper):
    """Methods for names and attribute lookup."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, also of unsharded units whose modules have views instead of parameters (FWD-08)."""
        super().zero_grad(set_to_none)
        for wrapper in Wrapper.fsdp_modules(self):
            for parameter in wrapper._unit.layout.local_parameters() if wrapper._unit is not None else []:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one (CTOR-10). Nothing is communicated."""
        return not self._is_inner

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All parameters that have a gradient. This is a deprecated name from torch 1.13 (NAMES-09)."""
        warn_renamed("params_with_grad", "[p for p in model.parameters() if p.grad is not None]")
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> NameMethods:
        """Raises an error, because shards and hooks cannot be copied individually (NEW-22)."""
        raise RuntimeError(message("copy-of-wrapper"))

    def __getattr__(self, name: str) -> Any:
        """Looks up attributes that the wrapper does not have in the wrapped module (NAMES-08)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """Indexes the wrapped module (NAMES-08)."""
        return self.module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Same as ``nn.Module``, but without wrapper prefixes inside ``summon_full_params`` (NAMES-02)."""
        self._mend()
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (name.replace(PREFIX, "") if self._shows_clean_names else name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Same as ``nn.Module``, but without wrapper prefixes inside ``summon_full_params`` (NAMES-03)."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (name.replace(PREFIX, "") if self._shows_clean_names else name), buffer
