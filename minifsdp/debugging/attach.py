"""Looking over a method's shoulder, for as long as a check is on.

The modules of the training step know nothing of debugging and ask no question about it. So a check that is on puts a
function in the place of a method, which calls the method and lets the check look::

    Cycle.pre_forward        the method itself, while nothing is on
    Cycle.pre_forward        observed(): the method, then ``values`` looks at what was gathered

Several checks may look at one method; the function is put there for the first of them, and when the last one is gone
the class has the very method again. That is why a check that is off costs nothing, not even a question.

Worked example: ``with attached(Root, "end_forward", after=look):`` calls ``look(result, root)`` behind each call of
``end_forward`` inside the block, on all trees, also on those that were made before.

*In torch:* debugging is asked about in each step, ``if self._debug_level``, where there is any.

Spec: DEBUG-03.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Look = Callable[..., None]
_observed: dict[tuple[type, str], tuple[list[Look], list[Look]]] = {}


@contextmanager
def attached(owner: type, name: str, *, before: Look | None = None, after: Look | None = None) -> Iterator[None]:
    """Inside the block, all calls of a method are looked at. Nothing is communicated.

    Args:
        owner: the class that defines the method.
        name: of the method.
        before: is called first, with what the method is called with.
        after: is called behind it, with its result and then with what it was called with. Not after an exception.
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
