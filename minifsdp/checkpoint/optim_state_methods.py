"""The functions behind the methods of a wrapper that save and load the optimizer's state.

They choose the form and call ``optim_state.py`` and ``optim_state_load.py``. The form is that of the model's own state
dict: ``state_dict_type`` sets both. Worked example::

    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        checkpoint = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optim)}
        ...
        model.load_state_dict(checkpoint["model"])
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, checkpoint["optim"]))

``get_optimizer_state_dict`` of ``torch.distributed.checkpoint`` is not supported: it calls the methods of torch's own
wrapper class, so it raises an error (``compat/wrapper_names.py``). Its counterparts for the model's state work.

*In torch:* the same two methods, and six older ones, which are in ``optim_state_legacy.py`` here.

Spec: OSD-01, OSD-02, OSD-10, OSD-LOAD-01, OSD-LOAD-02, OSD-LOAD-04.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minifsdp.checkpoint import optim_state, optim_state_load
from minifsdp.checkpoint.codec import Form
from minifsdp.checkpoint.optim_state_check import Target
from minifsdp.checkpoint.state_dict_methods import get_type
from minifsdp.engine.messages import message, warn_renamed


def save(
    model: nn.Module, optim: Optimizer, given: dict[str, Any] | None, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """The optimizer's state by original names, in the form that is chosen for the model. Every rank must call it.

    Raises:
        NotImplementedError: the local form is chosen.
    """
    form = _form_for(model)
    return optim_state.write(model, optim, optim.state_dict() if given is None else given, form, group)


def load(
    model: Any, optim: Any, given: Any, is_named_optimizer: bool = False, load_directly: bool = False
) -> dict[str, Any]:
    """The reverse of `save`: a dict for ``optim.load_state_dict``. Every rank must call it.

    Raises:
        NotImplementedError: the local form is chosen.
    """
    if isinstance(model, Mapping) and isinstance(optim, nn.Module):
        # The argument order in the examples of torch 2.1, which contradicts torch's own signature.
        name = "optim_state_dict_to_load"
        warn_renamed(f"{name}(optim_state_dict, model, optim)", f"{name}(model, optim, optim_state_dict)")
        model, optim, given = optim, given, model
    form = _form_for(model)
    own_keys = [key for key in optim.state if not isinstance(key, nn.Parameter)]
    target = Target(model, optim.param_groups, form, by_name=is_named_optimizer, own_keys=own_keys)
    loadable = optim_state_load.read(target, given)
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def _form_for(model: nn.Module) -> Form:
    settings = get_type(model)
    form = Form.of(settings.state_dict_type, settings.optim_state_dict_config)
    if form.is_local:
        raise NotImplementedError(message("no-local-optimizer"))
    return form
