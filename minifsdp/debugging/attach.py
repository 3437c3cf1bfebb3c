"""Wraps methods of the engine while a debugging check is on.

The modules of the training step contain no code for debugging. A check that is on replaces a method by a wrapper, which
calls the method and the functions of the check::

    IterationState.pre_forward        the method itself, while no check is on
    IterationState.pre_forward        observed(): the method, then ``values`` inspects the unsharded parameters

Several checks may observe one method. The first check installs the wrapper, and the end of the last one restores the
original method. So a check that is off costs nothing, not even a condition.

Worked example: ``with attached(Root, "end_forward", after=look):`` calls ``look(result, root)`` after each call of
``end_forward`` inside the block, for all roots, also for those created before.

*In torch:* debugging code checks a condition in each step, ``if self._debug_level``.

Spec: DEBUG-03.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Look = Callable[..., None]
_observed: dict[tuple[Any, str], tuple[list[Look], list[Look]]] = {}


@contextmanager
def attached(owner: Any, name: str, *, before: Look | None = None, after: Look | None = None) -> Iterator[None]:
    """Calls functions before and after each call of a method inside the block. Does not communicate.

    Args:
        owner: the class that defines the method, or a module that calls a function.
        name: the name of the method or function.
        before: called before the method, with the same arguments.
        after: called after the method, with its result and then the same arguments. Not called after an exception.
    """
    place = owner, name
    if place not in _observed:
        _observed[place] = [], []
        setattr(owner, name, _observing(vars(owner)[name], *_observed[place]))
    looks = _observed[place]
    added = [(kind, look) for kind, look in zip(looks, (before, after), strict=True) if look is not None]
    for kind, look in added:
        kind.append(look)
    try:
        yield
    finally:
        for kind, look in added:
            kind.remove(look)
        if looks == ([], []):
            setattr(owner, name, vars(owner)[name].__wrapped__)
            del _observed[place]


def _observing(method: Callable[..., Any], befores: list[Look], afters: list[Look]) -> Callable[..., Any]:
    @functools.wraps(method)
    def observed(*args: Any, **kwargs: Any) -> Any:
        for look in befores:
            look(*args, **kwargs)
        result = method(*args, **kwargs)
        for look in afters:
            look(result, *args, **kwargs)
        return result

    return observed
