"""Modules with custom state-dict code, and what such code is shown.

``state_dict()`` asks a module nothing, so this package need not show it anything: keys are enough, and values are put
in afterwards. But a module may have an opinion. It may override ``_save_to_state_dict`` to store a weight transposed,
or have a hook that renames the keys of an older version. Such code computes with values. It was written for a plain
module and must not meet a shard, or a place holder of no elements.

Worked example, a module with a hook ``state["weight"] = 2 * state["weight"]``, two ranks, a weight of 3 elements::

    rank 0    stores 2 of them, the hook is shown all 3, and the dict gets what it has made of them
    rank 1    stores 1 of them, the hook is shown all 3, and so on

So a unit that has such a module in it is gathered *before* the walk and shown in full while it goes on, as
``summon_full_params`` would; any other unit is gathered after its walk (see ``state_dict.py``), or not at all
(``state_dict_load.py``). The price is that an outer unit stays in full size while inner ones are written.

The user may also have summoned the model and call ``state_dict()`` then. That is the same case, with nothing
left to do: what modules show is full already, nothing is gathered, and one rank may call it alone.

*In torch:* every unit is shown in full during the walk, whether a hook looks or not.

Spec: SD-FULL-01, SD-FULL-08, SD-FULL-13, SUMMON-02, SUMMON-07.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from minifsdp.engine.layout import Slot
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.full_params import summoned
from minifsdp.fsdp1.wrapper import is_wrapper


def writes_by_itself(module: nn.Module) -> bool:
    """Whether code of the module's own has a part in what ``state_dict()`` writes, or its user's, in hooks."""
    if is_wrapper(module):
        # Hooks of the user's after it find a finished dict.
        return bool(module._state_dict_pre_hooks)
    has_hooks = bool(module._state_dict_pre_hooks or module._state_dict_hooks) and not _is_checkpoint(module)
    return has_hooks or _overrides(module, "state_dict", "_save_to_state_dict", "get_extra_state")


def reads_by_itself(module: nn.Module) -> bool:
    """Whether code of the module's own, or its user's, decides which keys ``load_state_dict()`` reads, and how."""
    # One of a wrapper's hooks is not its user's.
    has_hooks = len(module._load_state_dict_pre_hooks) > is_wrapper(module) and not _is_checkpoint(module)
    # A batch norm has code of its own for its counter, which is no parameter.
    is_norm = type(module)._load_from_state_dict is nn.modules.batchnorm._NormBase._load_from_state_dict
    return has_hooks or (_overrides(module, "_load_from_state_dict") and not is_norm)


def looks_while_read(module: nn.Module) -> bool:
    """Whether code of the module's own runs during ``load_state_dict()``, and may look at parameters."""
    return reads_by_itself(module) or _overrides(module, "set_extra_state")


def _overrides(module: nn.Module, *names: str) -> bool:
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)


def _is_checkpoint(module: nn.Module) -> bool:
    # An activation checkpoint has hooks that take its own name out of keys, and put it in again.
    return hasattr(module, "_checkpoint_wrapped_module")


def slots_of(unit: FlatUnit) -> list[Slot]:
    """Every place where one of the unit's parameters is registered."""
    return [slot for owned in unit.layout.parameters for slot in owned.slots]


@contextmanager
def full_parameters(unit: FlatUnit, *, writeback: bool) -> Generator[None]:
    """Full parameters on the unit's modules. All ranks of its shard group must enter and leave it.

    Args:
        unit: which is idle.
        writeback: whether each rank keeps its part of what they have become.
    """
    with summoned([unit], writeback=writeback, rank0_only=False, offload_to_cpu=False, with_grads=False):
        shown = [(slot, slot.module.get_parameter(slot.name)) for slot in slots_of(unit)]
        try:
            yield
        finally:
            for slot, parameter in shown:
                _give_back(slot, parameter)


def _give_back(slot: Slot, parameter: nn.Parameter) -> None:
    """``load_state_dict(assign=True)`` registers what it was given; here it is a value like any other."""
    given = slot.module._parameters.get(slot.name)
    if given is not None and given is not parameter:
        with torch.no_grad():
            parameter.copy_(given)
        slot.module._parameters[slot.name] = parameter
        slot.update_second_list(parameter)
