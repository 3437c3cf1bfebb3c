"""``load_state_dict`` on a sharded model: what would go wrong in silence is refused before anything is loaded.

A sharded model takes a dict of DTensors. Two mistakes are common:

* *a plain dict*, of whole tensors: PyTorch refuses the copy into a DTensor, key by key, in words about mixed kinds;
* *a model on the meta device*: copying into it succeeds and does nothing.

Both are noticed here, for the whole model, before the first value has been copied. For those who are finding their way,
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes the first one work: every rank cuts its rows out of the whole tensors.

*In torch:* the first ends in an error for each key, the second in a warning.

Spec: FS2-SD-04, FS2-SD-05, NEW-21.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.distributed.tensor import DTensor, distribute_tensor

from minifsdp.engine.trouble import trouble

__all__ = ["check_before_load"]


def check_before_load(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    """A hook before ``load_state_dict``.

    Raises:
        RuntimeError: whole tensors for a sharded model, or a model on the meta device without ``assign=True``.
    """
    sharded = {
        prefix + name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor) and prefix + name in state
    }
    on_meta = [key for key, parameter in sharded.items() if parameter.device.type == "meta"]
    if on_meta and not metadata.get("assign_to_params_buffers", False):
        raise RuntimeError(
            trouble(
                "load-into-meta",
                f"load_state_dict cannot copy values into parameters on the meta device ({_some(on_meta)}); pass "
                "assign=True, or give the model memory by to_empty(device=...) first",
            )
        )
    whole = [key for key in sharded if not isinstance(state[key], DTensor)]
    if not whole:
        return
    if get_debug_level() != DebugLevel.DETAIL:
        raise RuntimeError(
            trouble(
                "load-whole",
                f"load_state_dict was given whole tensors ({_some(whole)}) for a model that fully_shard has sharded. "
                "Use torch.distributed.checkpoint.state_dict.set_model_state_dict with "
                "StateDictOptions(full_state_dict=True), or distribute_tensor each of them first",
            )
        )
    for key in whole:
        parameter = sharded[key]
        value = state[key].to(parameter.device)
        # Every rank has the whole, so nobody needs to send anything.
        state[key] = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _some(keys: list[str]) -> str:
    return ", ".join(repr(key) for key in keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
