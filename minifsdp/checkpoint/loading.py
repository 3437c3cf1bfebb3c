"""``load_state_dict`` on a sharded model: what would go wrong in silence is refused before anything is loaded.

A sharded model takes a dict of DTensors. Three mistakes are common:

* *a plain dict*, of whole tensors: PyTorch refuses the copy into a DTensor, key by key, in words about mixed kinds;
* *a model on the meta device*: copying into it succeeds and does nothing;
* *DTensors over other ranks*, or the same ones in another order: PyTorch refuses the copy, and with ``assign=True``
  takes another rank's rows for its own.

All are noticed here, for the whole model, before the first value has been copied. For those who are finding their way,
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes the first one work: every rank cuts its rows out of the whole tensors.

*In torch:* the first ends in an error for each key, the second in a warning, the third in an error that names no ranks,
or in silence.

Spec: FS2-SD-04, FS2-SD-05, FS2-SD-14, NEW-21.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.distributed.tensor import DTensor, distribute_tensor

from minifsdp.checkpoint.agreement import some
from minifsdp.engine import comparison
from minifsdp.engine.messages import message
from minifsdp.engine.unit import Unit
from minifsdp.fsdp2.fsdp_state import states_in
from minifsdp.fsdp2.module import FSDPModuleState


class SavedState(FSDPModuleState):
    """What one call of ``fully_shard`` has made, with its part in ``state_dict`` and ``load_state_dict``."""

    def __init__(self, modules: list[nn.Module], unit: Unit | None, *rest: Any) -> None:
        super().__init__(modules, unit, *rest)
        for module in modules:
            module._register_load_state_dict_pre_hook(check_before_load, with_module=True)
        if unit is not None:
            for module in {slot.module for owned in unit.layout.parameters for slot in owned.slots}:
                module.register_state_dict_pre_hook(self._show_sharded)
                module._register_load_state_dict_pre_hook(self._show_sharded)

    def _show_sharded(self, *_: Any) -> None:
        comparison.read_all()
        self.reshard()


def check_before_load(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    """A hook before ``load_state_dict``. All units of ``module`` show their sharded parameters.

    Also those of which a dict has nothing: one rank may refuse what another one takes, and both gather the same next.

    Raises:
        RuntimeError: whole tensors for a sharded model, a model on the meta device without ``assign=True``, or DTensors
            that are cut otherwise.
    """
    shown = {prefix + name: parameter for name, parameter in module.named_parameters(remove_duplicate=False)}
    for _, one in states_in(module):
        if one.unit is not None:
            one.unit.reshard()
    now = {key: module.get_parameter(key.removeprefix(prefix)) for key in shown if key in state}
    sharded = {key: parameter for key, parameter in now.items() if isinstance(parameter, DTensor)}
    assigns = metadata.get("assign_to_params_buffers", False)
    _refuse_other_cuts(sharded, state, with_placements=assigns)
    on_meta = [key for key, parameter in sharded.items() if parameter.device.type == "meta"]
    if on_meta and not assigns:
        raise RuntimeError(message("load-into-meta", parameters=some([repr(key) for key in on_meta], 3)))
    whole = [key for key in sharded if not isinstance(state[key], DTensor)]
    # After an evaluation the root is shown whole, and PyTorch's functions make a full state dict like what is shown.
    helps = get_debug_level() == DebugLevel.DETAIL
    may_be_whole = {key for key in whole if helps or not isinstance(shown[key], DTensor)}
    refused = [repr(key) for key in whole if key not in may_be_whole or not isinstance(state[key], torch.Tensor)]
    if refused:
        raise RuntimeError(message("load-whole", tensors=some(refused, 3)))
    for key in whole:
        parameter = sharded[key]
        value = state[key].to(parameter.device)
        # Every rank has the whole, so nothing needs to be sent.
        state[key] = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _refuse_other_cuts(sharded: Mapping[str, DTensor], state: dict[str, Any], *, with_placements: bool) -> None:
    for key, parameter in sharded.items():
        value = state[key]
        if not isinstance(value, DTensor):
            continue
        is_elsewhere = value.device_mesh != parameter.device_mesh
        # A copy redistributes over the same ranks; a tensor that is put in the parameter's place stays as it is.
        if is_elsewhere or (with_placements and value.placements != parameter.placements):
            raise RuntimeError(message("load-other-cut", key=key, expected=_cut_how(parameter), found=_cut_how(value)))


def _cut_how(tensor: DTensor) -> str:
    ranks = tensor.device_mesh.mesh.tolist()
    return f"shape {tuple(tensor.shape)} on ranks {ranks} with placements {tensor.placements}"
