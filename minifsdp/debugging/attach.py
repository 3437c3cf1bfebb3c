"""Wraps methods of the engine while a debugging check is on.

The modules of the training step contain no code for debugging. A check that is on replaces a method by a wrapper, which
calls the method and then the functions of the check::

    IterationState.pre_forward        the method itself, while no check is on
    IterationState.pre_forward        observed(): the method, then ``values`` inspects the unsharded parameters

Several checks may observe one method. The first check installs the wrapper, and the end of the last one restores the
original method. So a check that is off costs nothing, not even a condition.

Worked example: ``with attached(RootState, "end_forward", look):`` calls ``look(result, root_state)`` after each call
of ``end_forward`` inside the block, for all root states, also for those created before.

*In torch:* debugging code checks a condition in each step, ``if self._debug_level``.

Spec: DEBUG-03.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Look = Callable[..., None]
_observed: dict[tuple[Any, str], list[Look]] = {}


@contextmanager
def attached(owner: Any, name: str, look: Look) -> Iterator[None]:
    """Calls ``look`` after each call of a method inside the block. Does not communicate.

    Args:
        owner: the class that defines the method, or a module that calls a function.
        name: the name of the method or function.
        look: called with the result of the method and then the same arguments. Not called after an exception.
    """
    place = owner, name
    if place not in _observed:
        _observed[place] = []
        setattr(owner, name, _observing(vars(owner)[name], _observed[place]))
    looks = _observed[place]
    looks.append(look)
    try:
        yield
    finally:
        looks.remove(look)
        if not looks:
            setattr(owner, name, vars(owner)[name].__wrapped__)
            del _observed[place]


def _observing(method: Callable[..., Any], looks: list[Look]) -> Callable[..., Any]:
    @functools.wraps(method)
    def observed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        for look in looks:
            look(result, *args, **kwargs)
        return result

    return observed
