"""Refuses the state dict of a part of a unit, such as ``model.blocks[0].linear.state_dict()``.

Only a wrapper can save or load its unit. In the modules inside it, the parameters are shards or are not registered at
all. So their own state dict would contain shards or no parameters, and loading would change some ranks only.

Worked example, ``model = FSDP(Sequential(Linear(3, 3), ReLU()))``::

    model.state_dict()               the wrapper's names are in the prefix: its hooks correct the values
    model.module[0].state_dict()     refused: the prefix is "", and the parameters are shards
    the same with summoned params    allowed, because the parameters are full

All ranks raise the error, even a rank whose shard contains a whole parameter.

*In torch:* the shards are returned under the names of the parameters, or nothing.

Spec: PROG-68.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from minifsdp.engine.messages import message
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.wrapper import PREFIX


class PartHook:
    """The hook before a module's state dict is saved or loaded. A copy of the module gets a hook without a unit.

    Args:
        unit: returns the unit that the module belongs to; without a unit, the hook does nothing.
    """

    def __init__(self, unit: Callable[[], FlatUnit | None] = lambda: None) -> None:
        self._unit = unit

    def __reduce__(self) -> tuple[Any, ...]:
        """Called when the module is copied or pickled."""
        return PartHook, ()

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Called by ``nn.Module``; one of the arguments is the prefix of the module's names."""
        prefix = next(given for given in args if isinstance(given, str))
        unit = self._unit()
        if unit is not None and not unit.layout.is_summoned and PREFIX not in prefix:
            raise RuntimeError(message("part-of-a-unit", type=type(module).__name__, unit=unit.name))


def register_hooks(unit: FlatUnit | None) -> None:
    """Registers hooks on the modules that own parameters of ``unit``, if these are not full parameters."""
    if unit is not None and (not unit.layout.use_orig_params or unit.plan.mesh.shard is not None):
        hook = PartHook(weakref.ref(unit))
        for module in {place.module for info in unit.layout.parameters for place in info.attributes}:
            module.register_state_dict_pre_hook(hook)
            module.register_load_state_dict_pre_hook(hook)


def num_of_user(hooks: Iterable[Any]) -> int:
    """The number of hooks of a module that these functions have not registered."""
    # `register_load_state_dict_pre_hook` stores the hook in another object.
    return sum(not isinstance(getattr(hook, "hook", hook), PartHook) for hook in hooks)
