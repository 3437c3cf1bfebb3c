"""Argument type checks of the public API.

Without a check, an ``int`` instead of a module raises ``'int' object has no attribute 'modules'`` ten frames inside the
package. Other mistakes are found later or not at all: a hook that is not callable fails in the first backward, and a
policy of another class is ignored. So the tables below list the type of each argument, and a call with another type
raises an error immediately, before anything is communicated or changed::

    model.set_gradient_divide_factor("two")
    TypeError: rank 0: set_gradient_divide_factor(): factor should be a number other than 0, got 'two'

Checks that depend on other arguments, on the model or on other ranks are in the code that uses the argument. The checks
in this file wrap the methods of the two public classes and the functions of API 2 (``fully_shard``), so the code of
these methods contains no type checks. The cost is one more Python call for each of these calls. None of them runs once
per unit.

*In torch:* mostly no checks; a few ``isinstance`` checks at the start of functions.

Spec: FUZZ-02.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine.messages import message
from minifsdp.fsdp1.options import BackwardPrefetch, CPUOffload
from minifsdp.fsdp2.fully_shard import fully_shard as _fully_shard
from minifsdp.fsdp2.module import FSDPModule
from minifsdp.fsdp2.module import register_fsdp_forward_method as _register_fsdp_forward_method
from minifsdp.fsdp2.module import share_comm_ctx as _share_comm_ctx
from minifsdp.fsdp2.options import OffloadPolicy
from minifsdp.fully_sharded_data_parallel import FullyShardedDataParallel

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kind:
    """The allowed type of an argument.

    Attributes:
        words: description of the type for the message.
        fits: returns whether a value has the type.
        error: the exception to raise if not.
    """

    words: str
    fits: Callable[[Any], bool]
    error: type[Exception] = TypeError


def _is(*types: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _is_number(value: Any) -> bool:
    try:
        return not math.isnan(float(value))
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_device(value: Any) -> bool:
    if callable(value) or isinstance(value, bool):
        # `build.compute_device` raises its own error for functions and bools.
        return True
    try:
        return value is None or bool(torch.device(value))
    except (TypeError, RuntimeError):
        return False


def _has_dtypes(value: Any, *names: str) -> bool:
    return all(isinstance(getattr(value, name, 3), torch.dtype | None) for name in names)


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "param_groups")


def _is_optimizer_state(value: Any) -> bool:
    """Does not check that both keys exist: the loading code checks it and raises on all ranks."""
    if not isinstance(value, Mapping):
        return value is None or _is_optimizer(value)
    is_list = isinstance(value.get("param_groups", ()), list | tuple)
    return is_list and isinstance(value.get("state", {}), Mapping)


def _are_parameters(value: Any) -> bool:
    # Not an iterator, because checking it would consume it.
    return value is None or (isinstance(value, Collection) and all(isinstance(one, torch.Tensor) for one in value))


MODULE = Kind("a torch.nn.Module", _is(nn.Module))
MODULES = Kind("a list of modules", _is(Iterable))
NUMBER = Kind("a number", _is_number)
SWITCH = Kind("True or False", _is(int))
OPTIMIZER = Kind("an optimizer", _is_optimizer)
FUNCTION = Kind("callable", callable)
MESH = Kind("a torch DeviceMesh or None", _is(DeviceMesh, type(None)))
STATE = Kind("a dict with names as keys", lambda value: isinstance(value, Mapping) and all(map(_is(str), value)))
OPTIMIZER_STATE = Kind("a dict with 'state' and 'param_groups'", _is_optimizer_state)
WHOLE_OPTIMIZER_STATE = Kind(
    "a dict with 'state' and 'param_groups'",
    lambda value: _is_optimizer_state(value) and (value is None or "state" in value),
)
PREFETCHES = ", ".join(f"BackwardPrefetch.{member.name}" for member in BackwardPrefetch)

# The allowed types by call and by argument name.
WRAPPER: dict[str, dict[str, Kind]] = {
    "__init__": {
        "device_id": Kind("an int, a torch.device or None", _is_device),
        "device_mesh": MESH,
        "backward_prefetch": Kind(f"one of {PREFETCHES} or None", _is(BackwardPrefetch, type(None))),
        "cpu_offload": Kind("a CPUOffload or None", _is(CPUOffload, type(None))),
        "mixed_precision": Kind(
            "a MixedPrecision of torch.dtypes, or None",
            lambda value: value is None or _has_dtypes(value, "param_dtype", "reduce_dtype", "buffer_dtype"),
        ),
    },
    "fsdp_modules": {"module": MODULE},
    "summon_full_params": {"module": MODULE},
    "apply": {"fn": FUNCTION},
    "clip_grad_norm_": {"max_norm": NUMBER, "norm_type": NUMBER},
    "register_comm_hook": {"hook": Kind("callable", callable, ValueError)},
    "load_state_dict": {"state_dict": STATE},
    "state_dict_type": {"module": MODULE},
    "set_state_dict_type": {"module": MODULE},
    "get_state_dict_type": {"module": MODULE},
    "optim_state_dict": {"model": MODULE, "optim": OPTIMIZER, "optim_state_dict": WHOLE_OPTIMIZER_STATE},
    # In an older argument order, the dict is first and the optimizer is last.
    "optim_state_dict_to_load": {
        "model": Kind("a torch.nn.Module", _is(nn.Module, Mapping)),
        "optim": Kind("an optimizer", lambda value: _is_optimizer(value) or isinstance(value, nn.Module)),
        "optim_state_dict": OPTIMIZER_STATE,
    },
    "full_optim_state_dict": {"model": MODULE, "optim": OPTIMIZER},
    "sharded_optim_state_dict": {"model": MODULE, "optim": OPTIMIZER},
    "shard_full_optim_state_dict": {"model": MODULE},
    "flatten_sharded_optim_state_dict": {"model": MODULE},
    "rekey_optim_state_dict": {"model": MODULE},
}
MODULE_METHODS: dict[str, dict[str, Kind]] = {
    "set_modules_to_forward_prefetch": {"modules": MODULES},
    "set_modules_to_backward_prefetch": {"modules": MODULES},
    "set_requires_gradient_sync": {"requires_gradient_sync": SWITCH},
    "set_requires_all_reduce": {"requires_all_reduce": SWITCH},
    "set_is_last_backward": {"is_last_backward": SWITCH},
    "set_reshard_after_forward": {
        "reshard_after_forward": Kind(
            "a bool here; a number of ranks can be chosen when fully_shard() is called", _is(bool), ValueError
        )
    },
    "set_reshard_after_backward": {"reshard_after_backward": SWITCH},
    "set_unshard_in_backward": {"unshard_in_backward": SWITCH},
    "set_gradient_divide_factor": {
        "factor": Kind("a number other than 0", lambda value: _is_number(value) and float(value) != 0)
    },
    "set_all_reduce_hook": {"hook": FUNCTION},
}


def takes(function: F, call: str, kinds: Mapping[str, Kind]) -> F:
    """Returns ``function`` with a check of its arguments before each call.

    Raises:
        TypeError: in a call with an argument of the wrong type; ``ValueError`` for kinds that specify it.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            # An unknown argument name, or an older name that the function itself handles.
            given = kwargs
        for name, kind in kinds.items():
            if name in given and not kind.fits(given[name]):
                raise kind.error(message("argument-type", call=call, name=name, words=kind.words, value=given[name]))
        return function(*args, **kwargs)

    # So that tracebacks and the collective log show the name of the called function.
    checked.__code__ = checked.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


def _attach(owner: type, methods: Mapping[str, Mapping[str, Kind]]) -> None:
    for name, kinds in methods.items():
        found = inspect.getattr_static(owner, name)
        function = found.__func__ if isinstance(found, staticmethod) else found
        checked = takes(function, owner.__name__ if name == "__init__" else name, kinds)
        setattr(owner, name, staticmethod(checked) if isinstance(found, staticmethod) else checked)


_attach(FullyShardedDataParallel, WRAPPER)
_attach(FSDPModule, MODULE_METHODS)
fully_shard = takes(
    _fully_shard,
    "fully_shard",
    {
        "mesh": MESH,
        "shard_placement_fn": Kind("callable or None", lambda value: value is None or callable(value)),
        "mp_policy": Kind(
            "a MixedPrecisionPolicy of torch.dtypes",
            lambda value: _has_dtypes(value, "param_dtype", "reduce_dtype", "output_dtype"),
        ),
        # Torch's own CPUOffloadPolicy would be treated as no offload.
        "offload_policy": Kind(
            "an OffloadPolicy of minifsdp, or None",
            lambda value: isinstance(value, OffloadPolicy | None) or type(value).__name__ == "OffloadPolicy",
        ),
        "ignored_params": Kind("a set of parameters or None", _are_parameters),
    },
)
register_fsdp_forward_method = takes(
    _register_fsdp_forward_method,
    "register_fsdp_forward_method",
    {"module": MODULE, "method_name": Kind("the name of a method", _is(str))},
)
share_comm_ctx = takes(_share_comm_ctx, "share_comm_ctx", {"modules": MODULES})
