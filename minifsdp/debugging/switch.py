"""``minifsdp.debug()``: turning on what costs something.

::

    minifsdp.debug()                        # everything, from here on; before the model is wrapped
    minifsdp.debug("values", "order")       # two of the checks
    with minifsdp.debug("values"):          # for some iterations
        train()

==========  ============================================================  ================
check       what it finds                                                 where it is told
==========  ============================================================  ================
weights     initial weights that differ between ranks                     ``weights.py``
values      where values that are not finite come up first                ``values.py``
order       ranks that gather different units, also in later iterations   ``order.py``
meta        what nothing has set, after a model was on the meta device    ``unset.py``
==========  ============================================================  ================

All ranks must turn on the same at the same place, because some of the checks communicate. ``MINIFSDP_DEBUG=1`` in the
environment turns on all of them when the package is imported, ``MINIFSDP_DEBUG=values,order`` these two.

A check is a context, and on as long as somewhere it is wanted. Worked example::

    everything = debug()        weights 1  values 1  order 1  meta 1
    with debug("values"):       weights 1  values 2  order 1  meta 1      entered at 1, nothing more to do
        everything.off()        weights 0  values 1  order 0  meta 0      three of them are left
    behind the block            weights 0  values 0  order 0  meta 0      and the fourth

*In torch:* ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, for the order alone, and read once.

Spec: DEBUG-01 to DEBUG-03.
"""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from minifsdp.debugging.order import always_compared
from minifsdp.debugging.unset import filled_and_named
from minifsdp.debugging.values import looked_at
from minifsdp.debugging.weights import compared
from minifsdp.engine.messages import message

VARIABLE = "MINIFSDP_DEBUG"
CHECKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "weights": compared,
    "values": looked_at,
    "order": always_compared,
    "meta": filled_and_named,
}
_num_wanted: Counter[str] = Counter()
_running: dict[str, AbstractContextManager[None]] = {}


class Debugging:
    """Checks that one call of `debug` has turned on; a context manager that turns them off at its end.

    Attributes:
        checks: their names.
    """

    def __init__(self, checks: tuple[str, ...]) -> None:
        self.checks = checks
        self._is_on = True
        for check in checks:
            if not _num_wanted[check]:
                _running[check] = CHECKS[check]()
                _running[check].__enter__()
            _num_wanted[check] += 1

    def off(self) -> None:
        """Turns them off, but for those that another call still wants. A second time does nothing."""
        if not self._is_on:
            return
        self._is_on = False
        for check in self.checks:
            _num_wanted[check] -= 1
            if not _num_wanted[check]:
                _running.pop(check).__exit__(None, None, None)

    def __enter__(self) -> "Debugging":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.off()


def debug(*checks: str) -> Debugging:
    """Turns on checks that cost something, from here until the end of the ``with`` block, if it is used in one.

    Every rank must make the same call at the same place. ``weights`` and ``meta`` look at units when they are made, so
    turn these on before the model is wrapped; if it was too late, the first forward says so.

    Args:
        *checks: ``"weights"``, ``"values"``, ``"order"``, ``"meta"``; none means all.

    Returns:
        A context manager; its method ``off()`` turns them off without a block.

    Raises:
        ValueError: there is no check of that name. Nothing was turned on.
    """
    unknown = [check for check in checks if check not in CHECKS]
    if unknown:
        raise ValueError(message("debug-unknown", unknown=unknown, known=", ".join(CHECKS)))
    return Debugging(tuple(dict.fromkeys(checks)) or tuple(CHECKS))


def from_environment() -> None:
    """Turns on what ``MINIFSDP_DEBUG`` says: 1 for all checks, or names with commas between them."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked not in ("", "0"):
        debug(*([] if asked == "1" else [name.strip() for name in asked.split(",")]))
