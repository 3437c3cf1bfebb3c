"""Ignored modules and parameters.

Another library can manage a part of the model: an embedding that it shards, a frozen tower on one device, an expert
that only this rank has. The user lists this part, and the unit around it ignores it: its parameters are not flattened
and not communicated, and their gradients are not reduced.

Ignoring a module ignores all its submodules, except inner wrappers. The user created such a wrapper explicitly, so it
still shards.

*In torch:* ``_get_ignored_modules`` and ``_get_ignored_params`` in ``_init_utils.py``.

Spec: IGN-01 to IGN-12.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from minifsdp.engine.messages import message, warn


class WrongElementsError(TypeError, ValueError):
    """An element of a list has the wrong type. Programs written for torch's FSDP catch either of the base classes."""


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
    roots, parameters = _sort_out(ignored_modules, ignored_states)
    for root in roots:
        if is_wrapper(root):
            raise ValueError(message("ignored-wrapper"))
    modules = {inner for root in roots for inner in _below(root, is_wrapper)}
    if module in modules:
        warn(message("ignored-all", type=type(module).__name__))
    parameters |= {parameter for inner in modules for parameter in inner.parameters(recurse=False)}
    return modules, parameters


def _sort_out(ignored_modules: Any, ignored_states: Any) -> tuple[list[nn.Module], set[nn.Parameter]]:
    if ignored_states is None:
        given = _as_list(ignored_modules, "ignored_modules")
        if not all(isinstance(item, nn.Module) for item in given):
            raise WrongElementsError(message("ignored-modules-type", types=_types(given)))
        return given, set()
    given = _as_list(ignored_states, "ignored_states")
    if all(isinstance(item, nn.Parameter) for item in given):
        return [], set(given)
    if all(isinstance(item, nn.Module) for item in given):
        return given, set()
    raise WrongElementsError(message("ignored-states-type", types=_types(given)))


def _types(given: list[Any]) -> list[type]:
    return sorted({type(item) for item in given}, key=repr)


def _as_list(given: Iterable[Any] | None, argument: str) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, Iterable):
        raise TypeError(message("ignored-not-iterable", argument=argument, type=type(given).__name__))
    return list(given)


def _below(module: nn.Module, is_wrapper: Callable[[nn.Module], bool]) -> Iterable[nn.Module]:
    if is_wrapper(module):
        return
    yield module
    for child in module.children():
        yield from _below(child, is_wrapper)
