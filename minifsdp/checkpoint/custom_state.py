"""Modules with custom state-dict code, and the parameters that this code gets.

``state_dict()`` usually needs only the keys, and the values are inserted afterwards. But a module can override
``_save_to_state_dict``, for instance to save a transposed weight, or have a hook that renames the keys of an older
version. Such code computes with values. It is written for a plain module, so it must not get a shard or an empty
placeholder.

Worked example, a module with a hook ``state["weight"] = 2 * state["weight"]``, two ranks, a weight of 3 elements::

    rank 0    stores 2 of them, the hook gets all 3, and the dict gets the result of the hook
    rank 1    stores 1 of them, the hook gets all 3, and so on

So a unit with such a module is all-gathered *before* the walk and unsharded during the walk, like in
``summon_full_params``. Any other unit is all-gathered after its walk (see ``state_dict.py``), or not at all
(``state_dict_load.py``). The price is that an outer unit stays unsharded while inner ones are saved.

The user may also call ``state_dict()`` inside ``summon_full_params``. That is the same case without the all-gather:
modules already have full parameters, nothing is communicated, and one rank may call it alone.

*In torch:* every unit is unsharded during the walk, with or without such code.

Spec: SD-FULL-01, SD-FULL-08, SD-FULL-13, SUMMON-02, SUMMON-07.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from minifsdp.engine.layout import ParamInfo
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.full_params import summoned
from minifsdp.fsdp1.wrapper import is_wrapper


def writes_by_itself(module: nn.Module) -> bool:
    """Whether custom code of the module, or a hook of the user, affects the result of ``state_dict()``."""
    if is_wrapper(module):
        # Hooks that run after the wrapper's own hook get the finished dict.
        return bool(module._state_dict_pre_hooks)
    has_hooks = bool(module._state_dict_pre_hooks or module._state_dict_hooks) and not _is_checkpoint(module)
    return has_hooks or _overrides(module, "state_dict", "_save_to_state_dict", "get_extra_state")


def reads_by_itself(module: nn.Module) -> bool:
    """Whether custom code of the module, or a hook of the user, decides which keys ``load_state_dict()`` loads."""
    # One hook of a wrapper is the wrapper's own.
    has_hooks = len(module._load_state_dict_pre_hooks) > is_wrapper(module) and not _is_checkpoint(module)
    # A batch norm has custom code for its counter, which is not a parameter.
    is_norm = type(module)._load_from_state_dict is nn.modules.batchnorm._NormBase._load_from_state_dict
    return has_hooks or (_overrides(module, "_load_from_state_dict") and not is_norm)


def looks_while_read(module: nn.Module) -> bool:
    """Whether custom code of the module runs during ``load_state_dict()`` and may read parameters."""
    return reads_by_itself(module) or _overrides(module, "set_extra_state")


def _overrides(module: nn.Module, *names: str) -> bool:
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)


def _is_checkpoint(module: nn.Module) -> bool:
    # The hooks of an activation checkpoint remove its name from keys, and add it again.
    return hasattr(module, "_checkpoint_wrapped_module")


def slots_of(unit: FlatUnit) -> list[ParamInfo]:
    """Every place where a parameter of the unit is registered."""
    return [slot for owned in unit.layout.parameters for slot in owned.attributes]


@contextmanager
def full_parameters(unit: FlatUnit, *, writeback: bool) -> Generator[None]:
    """Full parameters on the unit's modules. All ranks of its shard group must enter and exit it.

    Args:
        unit: an idle unit.
        writeback: whether each rank keeps its shard of the changed values.
    """
    with summoned([unit], writeback=writeback, rank0_only=False, offload_to_cpu=False, with_grads=False):
        shown = [(slot, slot.module.get_parameter(slot.name)) for slot in slots_of(unit)]
        try:
            yield
        finally:
            for slot, parameter in shown:
                _give_back(slot, parameter)


def _give_back(slot: ParamInfo, parameter: nn.Parameter) -> None:
    """Copies a tensor that ``load_state_dict(assign=True)`` has registered into the parameter that it replaced."""
    given = slot.module._parameters.get(slot.name)
    if given is not None and given is not parameter:
        with torch.no_grad():
            parameter.copy_(given)
        slot.module._parameters[slot.name] = parameter
        slot.update_second_list(parameter)
