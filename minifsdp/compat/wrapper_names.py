"""Private names of torch's wrapper that frameworks read, as far as they mean something here.

Accelerate looks at each wrapper's flat parameter before training with mixed precision. A model that was loaded in
bfloat16 would keep its master weights in bfloat16, where small updates round to nothing, so it widens them::

    if module._has_params:
        shard = module._flat_param
        if shard.dtype != torch.float32 and shard.requires_grad:
            shard.data = shard.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32

Without ``use_orig_params`` there is such a parameter. With it there is none: the shard is memory behind many. Then a
`Slice` stands in, and what is assigned to its ``data`` reaches the originals.

Worked example, one unit of 3 and 1 elements on two ranks. Rank 0's shard ``[a0 a1]`` is two elements of ``a``, rank 1's
``[a2 b0]`` one of each. Widened on rank 1, ``a`` and ``b`` both are float32 afterwards, ``a`` with one element there.

The functions of ``torch.distributed.checkpoint.state_dict`` set the form of a state dict by three more names before
they call ``state_dict()``, in torch's own words; they are translated. With these names the model's part of a
checkpoint is right whoever asks for it. The optimizer's part is not to be had in this way: torch's code would take a
`Slice` apart, and is told what to call instead.

*In torch:* ``params``, ``_has_params``, ``_flat_param``, ``_handle``, ``_is_root``, ``_state_dict_type``,
``_state_dict_config``, ``_optim_state_dict_config``, ``_sync_gradients`` and the names that
``_post_backward_final_callback`` reads of ``_FSDPState``.

Spec: NAMES-08, NAMES-11, ORIG-01, SD-CFG-02, START-08, START-09.
"""

import dataclasses
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.distributed.fsdp import api as torch_api
from torch.distributed.fsdp._common_utils import _FSDPState

from minifsdp.checkpoint import state_dict_options
from minifsdp.checkpoint.state_dict_methods import StateDictMethods
from minifsdp.engine.messages import message
from minifsdp.fsdp1.build import FlatUnit

# The first names that torch's functions for optimizer states read of a handle.
_ASKED_BY_OPTIMIZER_STATES = ("_use_orig_params", "flat_param")


class Slice:
    """This rank's shard of a unit, for who expects a flat parameter where there is none.

    Args:
        unit: which is sharded.

    Attributes:
        dtype, device, shape: of the shard.
        requires_grad: whether any parameter of the unit is trained.
    """

    def __init__(self, unit: FlatUnit) -> None:
        self._unit = unit
        owner = unit.layout.owner
        self.dtype, self.device, self.requires_grad = owner.shard.dtype, owner.shard.device, owner.requires_grad
        self.shape = owner.shard.shape
        self._fqns = tuple(owned.path for owned in unit.layout.parameters)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses what there is none of.

        Raises:
            AttributeError: with what to call instead.
        """
        if name in _ASKED_BY_OPTIMIZER_STATES:
            raise AttributeError(message("foreign-optimizer-state", name=name))
        raise AttributeError(message("flat-parameter-name", name=name))

    def numel(self) -> int:
        """Elements of the shard, padding included."""
        return self.shape.numel()

    @property
    def data(self) -> torch.Tensor:
        """1-D, the values."""
        return self._unit.layout.local_values()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        layout = self._unit.layout
        for parameter in layout.local_parameters():
            parameter.data = parameter.data.to(values.device, values.dtype)
        layout.settle()
        layout.overwrite_local(values)


def _in_torchs_words(name: str) -> property:
    """A field of the settings of state dicts, read and written in torch's own classes."""

    def read(wrapper: StateDictMethods) -> Any:
        return _translated(getattr(wrapper._state_dict_settings, name), torch_api)

    def write(wrapper: StateDictMethods, value: Any) -> None:
        ours = _translated(value, state_dict_options)
        # A type brings its own configurations, until others are set.
        is_type = name == "state_dict_type"
        before = state_dict_options.settings_for(ours, None, None) if is_type else wrapper._state_dict_settings
        wrapper._state_dict_settings = dataclasses.replace(before, **{name: ours})

    return property(read, write)


def _translated(value: Any, into: Any) -> Any:
    """A type or a configuration as the class of the same name in the module ``into``; torch hides one of the fields."""
    if value is None:
        return None
    target = getattr(into, type(value).__name__)
    if isinstance(value, Enum):
        return target[value.name]
    values = {field.name.lstrip("_"): getattr(value, field.name) for field in dataclasses.fields(value)}
    names = [field.name for field in dataclasses.fields(target)]
    return target(**{name: values[name.lstrip("_")] for name in names if name.lstrip("_") in values})


class FrameworkNames(StateDictMethods, _FSDPState):  # type: ignore[misc]
    """The private names of torch's wrapper that are read elsewhere.

    The second base is what PyTorch's checkpoint functions know a sharded module by. Nothing of it is used here.
    """

    @property
    def _has_params(self) -> bool:
        return self._unit is not None

    @property
    def _flat_param(self) -> Any:
        if self._unit is None or self._use_orig_params:
            return self._handle
        (parameter,) = self._unit.layout.local_parameters()
        parameter._fqns = self._handle._fqns  # type: ignore[attr-defined]
        return parameter

    @property
    def params(self) -> list[Any]:
        """The flat parameter, if there is one: the list has one element or none."""
        return [self._flat_param] if self._has_params else []

    @property
    def _is_root(self) -> bool | None:  # type: ignore[override]
        return None if self._tree is None else self._is_tree_root

    @property
    def _handle(self) -> Any:  # type: ignore[override]
        # What is noted on it is found out anew from the parameters when the next forward begins.
        return None if self._unit is None else Slice(self._unit)

    @property
    def _sync_gradients(self) -> bool:
        """Whether backward reduces gradients: false in ``no_sync()``."""
        units = [self._unit] if self._unit else self._tree.units if self._tree else []
        return all(unit.policy.reduces for unit in units)

    # Torch's `_post_backward_final_callback` reads these five of a root. Composer calls it when memory ran out.
    _all_fsdp_states = ()  # type: ignore[assignment]

    @property
    def _device_handle(self) -> Any:  # type: ignore[override]
        return torch.get_device_module(self.compute_device)

    @property
    def _post_backward_stream(self) -> Any:
        return self._device_handle.current_stream()

    _all_reduce_stream = _post_backward_stream

    @property
    def _exec_order_data(self) -> Any:
        # `mend` reshards all units, waits for reductions that were issued, and drops their results.
        return SimpleNamespace(next_iter=self._current_tree().mend)

    # Torch's checkpoint functions compare, set and restore these three.
    _state_dict_type = _in_torchs_words("state_dict_type")
    _state_dict_config = _in_torchs_words("state_dict_config")
    _optim_state_dict_config = _in_torchs_words("optim_state_dict_config")
