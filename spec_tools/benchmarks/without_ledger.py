"""The engine without its observers: the baseline for the cost of the always-on checks.

Do not train with it: mismatched collectives are not detected. The watchdog thread of each rank, which answers the other
ranks, keeps running; it waits in the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from minifsdp.checks.rank_checks import RankChecks
from minifsdp.engine.events import events, issue

_OF_ROOTS = ("forward_begins", "backward_begins", "backward_ends", "reduced", "left")


def _nothing(*_: object) -> None:
    """Replaces methods that record or compare."""


@contextmanager
def without_ledger() -> Iterator[None]:
    """Disables the log and the comparisons. Use it around whole iterations. Every rank must enter it."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(events, "collective", issue))
        for name in _OF_ROOTS:
            stack.enter_context(mock.patch.object(RankChecks, name, _nothing))
        yield
