"""Checks before ``load_state_dict`` on a model of ``fully_shard``, for mistakes that could otherwise go unnoticed.

A sharded model saves and loads a dict of DTensors, with the code of ``nn.Module``. Three mistakes are common:

* *a plain dict* of full tensors: PyTorch cannot copy them into a DTensor, and lists an error about mixed types per key;
* *a model on the meta device*: copying into it succeeds and does nothing;
* *DTensors over other ranks*, or over the same ranks in another order: PyTorch cannot copy them, and with
  ``assign=True`` it treats another rank's rows as its own.

`before_load` detects all three, for the whole model, before the first value is copied. With
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` it accepts a plain dict, and every rank shards the full tensors itself. `fully_shard`
calls `register_hooks` through ``events.states``, so that it does not import this package.

*In torch:* the first mistake raises an error for each key, and the second causes a warning. The third raises an error
that names no ranks, or goes unnoticed.

Spec: FS2-SD-04, FS2-SD-05, FS2-SD-14, NEW-21.
"""

import functools
import weakref
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from minifsdp.checks import state_dicts
from minifsdp.engine.events import events
from minifsdp.engine.unit import Unit
from minifsdp.fsdp2.fsdp_state import FSDPState, states_in


def register_hooks(state: FSDPState) -> None:
    """Registers hooks for ``state_dict`` and ``load_state_dict`` on the modules of a new state of ``fully_shard``."""
    for module in state.modules:
        module.register_load_state_dict_pre_hook(before_load)
    if state.unit is not None:
        # A weak reference, because `copy.deepcopy` of a module copies its hooks, and a unit cannot be copied.
        show_sharded = functools.partial(_show_sharded, weakref.ref(state.unit))
        for module in {
            slot.module
            for owned in state.unit.layout.param_infos
            for slot in owned.places
        }:
            module.register_state_dict_pre_hook(show_sharded)
            module.register_load_state_dict_pre_hook(show_sharded)


def _show_sharded(this: weakref.ref[Unit], *_: Any) -> None:
    for read in events.before_state_dict:
        read()
    if (unit := this()) is not None:
        unit.reshard()


def reshard_all(module: nn.Module) -> None:
    """Reshards the units of ``module``, which may still be unsharded after a backward that raised an error."""
    for _, state in states_in(module):
        if state.unit is not None:
            state.unit.reshard()


def before_load(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any
) -> None:
    """A hook before ``load_state_dict``. All units of ``module`` are resharded.

    This includes units without a key in the dict, so that ranks issue the same all-gathers even if only one raised.

    Raises:
        RuntimeError: full tensors for a sharded model, a model on the meta device without ``assign=True``, or DTensors
            with another sharding.
    """
    shown = {
        prefix + name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    reshard_all(module)
    sharded = {
        prefix + name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if prefix + name in state and isinstance(parameter, DTensor)
    }
    assigns = metadata.get("assign_to_params_buffers", False)
    given = {key: state[key] for key in sharded if isinstance(state[key], DTensor)}
    state_dicts.check_placements(sharded, given, assigns=assigns)
    # PyTorch's functions shard a parameter with several names under the first name only.
    known = {sharded[key]: value for key, value in given.items()}
    state.update(
        {key: known[p] for key, p in sharded.items() if p in known and key not in given}
    )
    full = {key: state[key] for key in sharded if not isinstance(state[key], DTensor)}
    state_dicts.check_full_tensors(full, shown)
    for key, value in full.items():
        parameter = sharded[key]
        # Every rank has the full tensor, so no communication is needed.
        state[key] = distribute_tensor(
            value if parameter.is_meta else value.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            src_data_rank=None,
        )
