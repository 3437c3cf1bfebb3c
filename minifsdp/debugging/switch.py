"""``minifsdp.debug()``: turns on checks that cost time.

::

    minifsdp.debug()                        # all checks, from here on; before the model is wrapped
    minifsdp.debug("values", "order")       # two of the checks
    with minifsdp.debug("values"):          # for some iterations
        train()

==========  =============================================================  ==============
check       finds                                                          described in
==========  =============================================================  ==============
weights     initial weights that differ between ranks                      ``weights.py``
values      the first values that are not finite                           ``values.py``
order       ranks that use different units in a backward                   `check_order`
meta        values that were not set after a model was on the meta device  ``unset.py``
memory      reads of unsharded parameters whose memory is freed            ``freed.py``
==========  =============================================================  ==============

All ranks must turn on the same checks at the same point of the program, because some checks communicate. If the package
is imported with ``MINIFSDP_DEBUG=1``, all checks are on; with ``MINIFSDP_DEBUG=values,order``, these two.

A check is on while at least one `debug` call needs it. Worked example, with the number of calls for each check::

    everything = debug()        weights 1  values 1  order 1  meta 1  memory 1
    with debug("values"):       weights 1  values 2  order 1  meta 1  memory 1      on already: only the count changes
        everything.off()        weights 0  values 1  order 0  meta 0  memory 0      four checks end
    after the block             weights 0  values 0  order 0  meta 0  memory 0      the fifth check ends

*In torch:* ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` only checks the order, only for FSDP1, and is read only once.

Spec: DEBUG-01 to DEBUG-03, DEBUG-07; NEW-19 is the check of the order itself.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from minifsdp.checks.rank_checks import RankChecks
from minifsdp.debugging.freed import check_memory
from minifsdp.debugging.unset import check_unset
from minifsdp.debugging.values import check_values
from minifsdp.debugging.weights import check_weights
from minifsdp.engine.messages import message


@contextmanager
def check_order() -> Iterator[None]:
    """The check ``order``: an error instead of a warning if the ranks use different units of equal sizes.

    By default, a backward raises an error if kinds, sizes or dtypes of its collectives differ between ranks. It only
    warns if the numbers of their units differ (``checks/rank_checks.py``), because ranks may build the same unit in
    different models. With this check, both raise the same error. Use it if all ranks build equal models.

    Worked example, two ranks, units ``a`` and ``b`` of equal sizes; rank 0 runs ``a b``, and rank 1 runs ``b a``. Then
    the backward of both ranks raises an error with "rank 0: all-gather of 'a'" and "rank 1: all-gather of 'b'".

    Cost: none.
    """
    RankChecks.is_strict = True
    try:
        yield
    finally:
        RankChecks.is_strict = False


CHECKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "weights": check_weights,
    "values": check_values,
    "order": check_order,
    "meta": check_unset,
    "memory": check_memory,
}
_num_wanted: Counter[str] = Counter()
_running: dict[str, AbstractContextManager[None]] = {}


class Debugging(ExitStack):
    """Checks that one call of `debug` has turned on; a context manager that turns them off at its end.

    Attributes:
        checks: their names.
    """

    def __init__(self, checks: tuple[str, ...]) -> None:
        super().__init__()
        self.checks = checks
        for check in checks:
            if not _num_wanted[check]:
                _running[check] = CHECKS[check]()
                _running[check].__enter__()
            _num_wanted[check] += 1
            self.callback(_end, check)

    def off(self) -> None:
        """Turns off the checks, except those that another call still needs. A second call does nothing."""
        self.close()


def _end(check: str) -> None:
    """Ends one use of a check, and turns it off if no other call needs it."""
    _num_wanted[check] -= 1
    if not _num_wanted[check]:
        _running.pop(check).__exit__(None, None, None)


def debug(*checks: str) -> Debugging:
    """Turns on debugging checks. If used in a ``with`` statement, they end with the block.

    Every rank must make the same call at the same point. ``weights`` and ``meta`` inspect units when they are created.
    Turn these on before the model is wrapped; otherwise the first forward issues a warning.

    Args:
        *checks: ``"weights"``, ``"values"``, ``"order"``, ``"meta"``, ``"memory"``; none means all.

    Returns:
        A context manager. Its method ``off()`` turns off the checks without a ``with`` block.

    Raises:
        ValueError: there is no check of that name. No check was turned on.
    """
    if unknown := [check for check in checks if check not in CHECKS]:
        raise ValueError(
            message("debug-unknown", unknown=unknown, known=", ".join(CHECKS))
        )
    return Debugging(tuple(dict.fromkeys(checks)) or tuple(CHECKS))


def from_environment() -> None:
    """Turns on the checks in ``MINIFSDP_DEBUG``: 1 for all checks, or names with commas between them."""
    asked = os.environ.get("MINIFSDP_DEBUG", "").strip()
    if asked not in ("", "0"):
        debug(*([] if asked == "1" else [name.strip() for name in asked.split(",")]))
