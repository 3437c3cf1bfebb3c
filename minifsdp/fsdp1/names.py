"""Names of parameters and buffers, as a wrapper shows them, and attributes and items of the wrapped module.

Names contain the wrappers' prefixes, as in torch. Inside ``summon_full_params``, they are the names of the unwrapped
model. A wrapper also looks up attributes and items in the wrapped module: ``model.layer``, ``model[0]`` and
``model.vocab_size``.

Worked example: the weight of ``FSDP(Sequential(FSDP(Linear(2, 2))))`` is named
``_fsdp_wrapped_module.0._fsdp_wrapped_module.weight``, and inside ``summon_full_params`` it is named ``0.weight``.

*In torch:* methods of the wrapper class.

Spec: NAMES-02, NAMES-03, NAMES-08, NAMES-09, PROG-100.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minifsdp.cases.kept_views import kept_view
from minifsdp.engine.messages import message, warn_renamed
from minifsdp.fsdp1.wrapper import PREFIX, WRAPPED, Wrapper


class NamedWrapper(Wrapper):
    """A wrapper that shows the names, attributes and items of the module that it wraps."""

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one (CTOR-10). Nothing is communicated."""
        return not self._is_inner

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All parameters that have a gradient. This is a deprecated name from torch 1.13 (NAMES-09)."""
        warn_renamed(
            "params_with_grad", "[p for p in model.parameters() if p.grad is not None]"
        )
        return [
            parameter for parameter in self.parameters() if parameter.grad is not None
        ]

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Same as ``nn.Module``, but without wrapper prefixes inside ``summon_full_params`` (NAMES-02)."""
        self._recover_after_error()
        found = super().named_parameters(*args, **kwargs)
        return ((self._shown(name), kept_view(value)) for name, value in found)

    def named_buffers(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Same as ``nn.Module``, but without wrapper prefixes inside ``summon_full_params`` (NAMES-03)."""
        return (
            (self._shown(name), value)
            for name, value in super().named_buffers(*args, **kwargs)
        )

    def _shown(self, name: str) -> str:
        return name.replace(PREFIX, "") if self._shows_clean_names else name

    def __getattr__(self, name: str) -> Any:
        """Looks up an attribute in the wrapped module if the wrapper does not have it (NAMES-08)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Rejects a tensor or module under a name of the wrapped module, which would not use it."""
        is_new = (
            WRAPPED in self._modules
            and name not in self._modules
            and name not in self.__dict__
        )
        kinds = (torch.Tensor, nn.Module)
        # The forward may read a tensor or a module of this name. Other values can belong to the program.
        if (
            is_new
            and isinstance(value, kinds)
            and isinstance(getattr(self.module, name, None), kinds)
        ):
            raise AttributeError(
                message("set-on-wrapper", name=name, type=type(self.module).__name__)
            )
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        """Indexes the wrapped module (NAMES-08)."""
        return self.module[key]  # type: ignore[index]
