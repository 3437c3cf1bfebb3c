"""The methods of a wrapper that save and load the optimizer's state.

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
from minifsdp.checkpoint.state_dict_methods import StateDictMethods
from minifsdp.engine.messages import message, warn_renamed


class OptimStateMethods(StateDictMethods):
    """Saving and loading the optimizer's state."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state by original names, in the form that is chosen for the model. Every rank must call it.

        Args:
            model: a wrapper, or a module that contains wrappers.
            optim: created from the model's parameters.
            optim_state_dict: the dict to convert; ``None`` means ``optim.state_dict()``.
            group: with ``rank0_only``, its first rank gets the result; ``None`` means the model's shard group.

        Returns:
            ``"state"`` keyed by names and ``"param_groups"`` with names; empty with ``rank0_only`` on other ranks.

        Raises:
            NotImplementedError: the local form is chosen.
            RuntimeError: the ranks' states do not match, or the optimizer has parameters that the model does not have,
                on all ranks; or some rank did not call.
        """
        form = _form_for(model)
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return optim_state.write(model, optim, given, form, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The reverse of `optim_state_dict`: a dict for ``optim.load_state_dict``. Every rank must call it.

        Args:
            model: a wrapper, or a module that contains wrappers.
            optim: created from the model's parameters.
            optim_state_dict: by original names, in the form that is chosen for the model. With ``rank0_only`` the first
                rank's dict is read.
            is_named_optimizer: whether ``optim`` keys its own state dict by names.
            load_directly: call ``optim.load_state_dict`` as well.
            group: unused, because each unit stores its own groups.

        Raises:
            RuntimeError: the dict does not fit, on all ranks, and nothing has changed; or some rank did not call.
            ValueError: the same; or there is no unit in the model.
        """
        if isinstance(model, Mapping) and isinstance(optim, nn.Module):
            # The argument order in the examples of torch 2.1, which contradicts torch's own signature.
            warn_renamed(
                "optim_state_dict_to_load(optim_state_dict, model, optim)",
                "optim_state_dict_to_load(model, optim, optim_state_dict)",
            )
            model, optim, optim_state_dict = optim, optim_state_dict, model
        form = _form_for(model)
        own_keys = [key for key in optim.state if not isinstance(key, nn.Parameter)]
        target = Target(model, optim.param_groups, form, by_name=is_named_optimizer, own_keys=own_keys)
        loadable = optim_state_load.read(target, optim_state_dict)
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable


def _form_for(model: nn.Module) -> Form:
    settings = StateDictMethods.get_state_dict_type(model)
    form = Form.of(settings.state_dict_type, settings.optim_state_dict_config)
    if form.is_local:
        raise NotImplementedError(message("no-local-optimizer"))
    return form
