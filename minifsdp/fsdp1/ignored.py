"""Ignored modules and parameters.

Other code can manage a part of the model, for example an embedding that another library shards, a frozen tower on one
device, or an expert that only this rank has. The user lists this part, and the unit around it ignores it: the unit does
not flatten or communicate its parameters, and does not reduce their gradients.

Ignoring a module ignores all its submodules, except inner wrappers. The user created such a wrapper explicitly, so it
still shards its parameters.

*In torch:* ``_get_ignored_modules`` and ``_get_ignored_params`` in ``_init_utils.py``.

Spec: IGN-01 to IGN-12.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from minifsdp.engine.messages import message, warn
from minifsdp.engine.unit import modules_of_unit


class WrongElementsError(TypeError, ValueError):
    """An element of a list has the wrong type. Programs for torch's FSDP catch either of the base classes."""


def find_ignored(
    module: nn.Module,
    ignored_modules: Any,
    ignored_states: Any,
    is_wrapper: Callable[[nn.Module], bool],
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Returns the modules and parameters that the wrapper around ``module`` ignores. Nothing is communicated.

    Raises:
        ValueError: if both arguments were given, an element is a wrapper, or parameters and modules are mixed.
        TypeError: if an argument is not iterable or has an element of another type.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(message("ignored-both"))
    roots = _as_list(ignored_modules, "ignored_modules")
    states = _as_list(ignored_states, "ignored_states")
    if not _all_are(nn.Module, roots):
        raise WrongElementsError(message("ignored-modules-type", types=_types(roots)))
    if _all_are(nn.Module, states):
        roots = [*roots, *states]
        states = []
    elif not _all_are(nn.Parameter, states):
        raise WrongElementsError(message("ignored-states-type", types=_types(states)))
    if any(map(is_wrapper, roots)):
        raise ValueError(message("ignored-wrapper"))
    modules = {inner for _, inner in modules_of_unit(roots, is_wrapper)}
    if module in modules:
        warn(message("ignored-all", type=type(module).__name__))
    return modules, {
        *states,
        *(
            parameter
            for inner in modules
            for parameter in inner.parameters(recurse=False)
        ),
    }


def _as_list(given: Any, argument: str) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, Iterable):
        raise TypeError(
            message(
                "ignored-not-iterable", argument=argument, type=type(given).__name__
            )
        )
    return list(given)


def _all_are(cls: type, given: list[Any]) -> bool:
    return all(isinstance(item, cls) for item in given)


def _types(given: list[Any]) -> list[type]:
    return sorted({type(item) for item in given}, key=repr)
