"""Argument type checks of the public API.

Without a check, an ``int`` instead of a module raises ``'int' object has no attribute 'modules'`` ten frames inside the
package. Other mistakes appear later or not at all: a hook that is not callable fails in the first backward, and a
policy of another class is ignored. So each public function first checks its arguments, with one line for each argument.
A wrong type raises an error before any communication or change::

    require(FACTOR, "set_gradient_divide_factor", factor=factor)

    model.set_gradient_divide_factor("two")
    TypeError: rank 0: set_gradient_divide_factor(): factor should be a number other than 0, got 'two'

This file defines the allowed types. Checks that depend on other arguments, on the model or on other ranks are in the
code that uses the argument. Functions that run once per unit and step do not check types.

*In torch:* a few ``isinstance`` checks at the start of functions.

Spec: FUZZ-02.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine.messages import message, warn


def is_only_called_in_parts(module: nn.Module) -> bool:
    """Whether ``module`` is a list or dict. It has no forward, so its unit would never be all-gathered.

    Other modules without a forward may have another method that issues the all-gather.
    """
    return type(module).forward is nn.Module.forward and isinstance(
        module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    )


@dataclass(frozen=True)
class Kind:
    """The allowed type of an argument.

    Attributes:
        words: description of the type for the message.
        fits: a function that returns whether a value has the type.
        error: the exception to raise if the value does not have the type.
    """

    words: str
    fits: Callable[[Any], bool]
    error: type[Exception] = TypeError


def require(kind: Kind, call: str, **given: Any) -> None:
    """Checks arguments of the public function ``call``.

    Raises:
        TypeError: if an argument of ``given`` is not of ``kind``; some kinds specify ``ValueError`` instead.
    """
    for name, value in given.items():
        if not kind.fits(value):
            raise kind.error(
                message(
                    "argument-type", call=call, name=name, words=kind.words, value=value
                )
            )


def is_a(*types: Any) -> Callable[[Any], bool]:
    """A function that returns whether a value is an instance of ``types``."""
    return lambda value: isinstance(value, types)


def or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A function that returns whether a value is ``None`` or ``fits`` accepts it."""
    return lambda value: value is None or fits(value)


def _is_number(value: Any) -> bool:
    try:
        return not math.isnan(float(value))
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_policy(value: Any, third: str) -> bool:
    """Whether ``value`` is an object with the two common dtypes of mixed precision, and the attribute ``third``."""
    return not isinstance(value, type) and all(
        isinstance(getattr(value, name, "missing"), torch.dtype | None)
        for name in ("param_dtype", "reduce_dtype", third)
    )


def _is_optimizer_state(value: Any) -> bool:
    """Does not check that both keys exist. The loading code checks this and raises an error on all ranks."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("param_groups", ()), list | tuple)
        and isinstance(value.get("state", {}), Mapping)
    )


def _are_parameters(value: Any) -> bool:
    # Reject iterators, because a check would consume them.
    return isinstance(value, Collection) and all(
        isinstance(one, torch.Tensor) for one in value
    )


def warn_renamed(old: str, new: str) -> None:
    """Issues the warning for a renamed function or argument."""
    warn(message("old-spelling", old=old, new=new), FutureWarning)


MODULE = Kind("a torch.nn.Module", is_a(nn.Module))
MODULES = Kind("a list of modules", is_a(Iterable))
NUMBER = Kind("a number", _is_number)
FACTOR = Kind(
    "a number other than 0", lambda value: _is_number(value) and float(value) != 0
)
SWITCH = Kind("True or False", is_a(int))
RESHARD = Kind(
    "a bool here; a number of ranks can be chosen when fully_shard() is called",
    is_a(bool),
    ValueError,
)
OPTIMIZER = Kind(
    "an optimizer",
    lambda value: hasattr(value, "state_dict") and hasattr(value, "param_groups"),
)
FUNCTION = Kind("callable", callable)
HOOK = Kind("callable", callable, ValueError)
FUNCTION_OR_NONE = Kind("callable or None", or_none(callable))
METHOD_NAME = Kind("the name of a method", is_a(str))
PRECISION = Kind(
    "a MixedPrecision of torch.dtypes, or None",
    or_none(lambda value: _is_policy(value, "buffer_dtype")),
)
PRECISION_POLICY = Kind(
    "a MixedPrecisionPolicy of torch.dtypes",
    lambda value: _is_policy(value, "output_dtype"),
)
MESH = Kind("a torch DeviceMesh or None", or_none(is_a(DeviceMesh)))
PARAMETERS = Kind("a set of parameters or None", or_none(_are_parameters))
STATE = Kind(
    "a dict with names as keys",
    lambda value: isinstance(value, Mapping) and all(map(is_a(str), value)),
)
OPTIMIZER_STATE = Kind(
    "a dict with 'state' and 'param_groups'", or_none(_is_optimizer_state)
)
WHOLE_OPTIMIZER_STATE = Kind(
    OPTIMIZER_STATE.words,
    or_none(lambda one: _is_optimizer_state(one) and "state" in one),
)
