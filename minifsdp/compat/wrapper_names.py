"""Private attributes of torch's wrapper that frameworks read, where they have a meaning in minifsdp.

Accelerate reads each wrapper's flat parameter before training with mixed precision. A model that was loaded in bfloat16
would keep its master weights in bfloat16, where small updates round to zero. So it converts them to float32::

    if module._has_params:
        shard = module._flat_param
        if shard.dtype != torch.float32 and shard.requires_grad:
            shard.data = shard.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32

This parameter exists without ``use_orig_params``. With ``use_orig_params`` there is no flat parameter, because several
parameters share the memory of the shard. A `Slice` replaces it; assigning its ``data`` changes the original parameters.

Worked example, one unit of 3 and 1 elements on two ranks. Rank 0's shard ``[a0 a1]`` is two elements of ``a``, rank 1's
``[a2 b0]`` one of each. After the conversion on rank 1, both are float32 there, ``a`` and ``b`` with one element each.

The functions of ``torch.distributed.checkpoint.state_dict`` set three more attributes before they call
``state_dict()``. Their values are of torch's classes, so they are converted. They also check each module with
``isinstance`` for torch's wrapper, before they remove its prefix from names. So at this place alone, ``__class__`` of a
wrapper is a subclass of torch's class. This class is only
compared: nothing is inherited from it. Then torch's functions save and load the model correctly. They do not support
the optimizer state, because torch's code reads internals of the handle. Reading these raises an error that names the
functions of ``state_dict_functions.py``. If a program has replaced torch's names, torch's functions call minifsdp's
methods, and all of them work.

*In torch:* ``params``, ``_has_params``, ``_flat_param``, ``_handle``, ``_is_root``, ``training_state``,
``_state_dict_type``, ``_state_dict_config``, ``_optim_state_dict_config``, ``_sync_gradients`` and the attributes of
``_FSDPState`` that ``_post_backward_final_callback`` reads.

Spec: NAMES-08, NAMES-11, NAMES-12, ORIG-01, SD-CFG-02, START-08, START-09, PROG-98.
"""

import dataclasses
import functools
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.fsdp import api as torch_api
from torch.distributed.fsdp.fully_sharded_data_parallel import TrainingState

from minifsdp.checkpoint import state_dict_options
from minifsdp.checkpoint.state_dict_options import settings_for, state_of
from minifsdp.engine.messages import message
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.wrapper import WRAPPED, Wrapper


class Slice:
    """This rank's shard of a unit, for code that expects a flat parameter when there is none.

    Args:
        unit: the unit.

    Attributes:
        dtype, device, shape, numel: those of the shard, which includes padding.
        requires_grad: whether any parameter of the unit requires gradients.
    """

    def __init__(self, unit: FlatUnit) -> None:
        self._unit = unit
        self._shard = unit.layout.registered.shard
        self.requires_grad = unit.layout.registered.requires_grad
        self._fqns = tuple(owned.path for owned in unit.layout.param_infos)

    def __getattr__(self, name: str) -> Any:
        """The attributes and methods of the shard that are listed above.

        Raises:
            AttributeError: for other names; the message names the function to call instead.
        """
        if name in ("dtype", "device", "shape", "numel"):
            return getattr(self._shard, name)
        # Torch's functions for optimizer states read these attributes of a handle first.
        if name in ("_use_orig_params", "flat_param"):
            raise AttributeError(message("foreign-optimizer-state", name=name))
        raise AttributeError(message("flat-parameter-name", name=name))

    @property
    def data(self) -> torch.Tensor:
        """The values, 1-D."""
        return self._unit.layout.local_values()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        layout = self._unit.layout
        for parameter in layout.local_parameters:
            parameter.data = parameter.data.to(values.device, values.dtype)
        layout.refresh()
        layout.overwrite_local(values)


def class_for_caller(wrapper: Wrapper) -> type:
    """The wrapper's class; a subclass of torch's wrapper where a function of torch removes the prefix of a wrapper."""
    frame = sys._getframe(1)
    is_torchs_function = frame.f_globals.get("__name__") == state_dict.__name__
    # For other names below a wrapper, torch's function ignores extra states and `_fqn_modifiers`.
    if is_torchs_function and frame.f_locals.get("curr_obj_name") == WRAPPED:
        return _torchs_class(type(wrapper))  # type: ignore[arg-type]
    return type(wrapper)


@functools.cache
def _torchs_class(own: Any) -> type:
    """A class that only ``isinstance`` uses. It has no objects."""
    return type(own.__name__, (own, TorchWrapper), {})


def setting(name: str) -> property:
    """A property for a field of the state dict settings, read and written as instances of torch's classes."""

    def read(wrapper: Wrapper) -> Any:
        return _translated(getattr(state_of(wrapper).settings, name), torch_api)

    def write(wrapper: Wrapper, value: Any) -> None:
        # Setting a type also sets its default configurations.
        is_type = name == "state_dict_type"
        ours = _translated(value, state_dict_options)
        before = (
            settings_for(ours, None, None) if is_type else state_of(wrapper).settings
        )
        state_of(wrapper).settings = dataclasses.replace(before, **{name: ours})

    return property(read, write)


class TorchNames(Wrapper):
    """A wrapper with the private attributes of torch's wrapper."""

    __class__ = property(class_for_caller)

    @property
    def params(self) -> list[Any]:
        """A list of the flat parameter; empty if there is none."""
        return [self._flat_param] if self._has_params else []

    @property
    def _has_params(self) -> bool:
        return self._unit is not None

    @property
    def _handle(self) -> Slice | None:
        # Attributes that a program sets on this object are lost. The next forward reads the values from the parameters.
        return None if self._unit is None else Slice(self._unit)

    @property
    def _flat_param(self) -> Any:
        if self._unit is None or self._use_orig_params:
            return self._handle
        (parameter,) = self._unit.layout.local_parameters
        parameter._fqns = Slice(self._unit)._fqns  # type: ignore[attr-defined]
        return parameter

    @property
    def _is_root(self) -> bool | None:
        return None if self._root_state is None else self._is_outermost

    @_is_root.setter
    def _is_root(self, _: bool | None) -> NoReturn:
        # Torch's functions for optimizer states set this attribute before they read other private ones.
        raise AttributeError(message("foreign-optimizer-state", name="_is_root"))

    @property
    def training_state(self) -> TrainingState:
        """The state of a wrapper. An outermost wrapper without parameters has the state of its root."""
        if self._shows_clean_names:
            return TrainingState.SUMMON_FULL_PARAMS
        if self._unit is not None:
            is_busy = self._unit.phase is not Phase.IDLE
        else:
            is_busy = (
                self._is_outermost
                and self._root_state is not None
                and self._root_state.is_busy
            )
        return TrainingState.FORWARD_BACKWARD if is_busy else TrainingState.IDLE

    @property
    def _sync_gradients(self) -> bool:
        """Whether backward reduces gradients: false in ``no_sync()``."""
        units = (
            [self._unit]
            if self._unit
            else self._root_state.units
            if self._root_state
            else []
        )
        return all(unit.policy.reduces for unit in units)

    # Torch's `_post_backward_final_callback`, which Composer calls when memory runs out, reads these five attributes.
    _all_fsdp_states = ()

    @property
    def _device_handle(self) -> Any:
        return torch.get_device_module(self.compute_device)

    @property
    def _post_backward_stream(self) -> Any:
        return self._device_handle.current_stream()

    _all_reduce_stream = _post_backward_stream

    @property
    def _exec_order_data(self) -> Any:
        # `recover_after_error` reshards all units, waits for issued reductions, and drops their results.
        return SimpleNamespace(next_iter=self._current_root_state().recover_after_error)

    # Torch's checkpoint functions compare, set and restore these three attributes.
    _state_dict_type = setting("state_dict_type")
    _state_dict_config = setting("state_dict_config")
    _optim_state_dict_config = setting("optim_state_dict_config")


def _translated(value: Any, into: Any) -> Any:
    """Converts a type or configuration to the class of the same name in ``into``."""
    target = getattr(into, type(value).__name__)
    return target[value.name] if isinstance(value, Enum) else target(**vars(value))
