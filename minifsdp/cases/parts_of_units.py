"""The state dict of a part of a unit, such as ``model.blocks[0].linear.state_dict()``.

Only a wrapper can save or load its unit. In the modules inside it, the parameters are shards or are not registered at
all. A program that saves only one layer calls a module inside a wrapper::

    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    model.state_dict()                                  # the wrapper's names are in the prefix: its hooks correct them
    model.module[0].state_dict()                        # an error: the prefix is ""
    with FSDP.summon_full_params(model):
        model.module[0].state_dict()                    # allowed, because the parameters are full

Without this case, the third line would return shards, or no parameters, and loading it would change some ranks only.
The constructor of a wrapper calls `register_hooks`, whose hooks raise the error. All ranks raise it, even a rank whose
shard contains a whole parameter.

*In torch:* the shards are returned under the names of the parameters, or nothing.

Spec: PROG-68.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from minifsdp.engine.messages import message
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.wrapper import PREFIX

# By module, the unit of its parameters. A copy of a module belongs to no unit.
_units: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FlatUnit]] = (
    weakref.WeakKeyDictionary()
)


def refuse_part(module: nn.Module, *args: Any) -> None:
    """The hook before a module's state dict is saved or loaded. One of ``args`` is the prefix of the module's names."""
    prefix = next(given for given in args if isinstance(given, str))
    unit = _units[module]() if module in _units else None
    if unit is not None and not unit.layout.is_summoned and PREFIX not in prefix:
        raise RuntimeError(
            message("part-of-a-unit", type=type(module).__name__, unit=unit.name)
        )


def register_hooks(unit: FlatUnit | None) -> None:
    """Registers hooks on the modules that own parameters of ``unit``, if these are not full parameters."""
    if unit is not None and (
        not unit.layout.use_orig_params or unit.plans[0].mesh.shard is not None
    ):
        for module in {
            place.module for info in unit.layout.param_infos for place in info.places
        }:
            _units[module] = weakref.ref(unit)
            module.register_state_dict_pre_hook(refuse_part)
            module.register_load_state_dict_pre_hook(refuse_part)


def num_of_user(hooks: Iterable[Any]) -> int:
    """The number of hooks of a module that these functions have not registered."""
    # `register_load_state_dict_pre_hook` stores the hook in another object.
    return sum(getattr(hook, "hook", hook) is not refuse_part for hook in hooks)
