"""The engine without the collective log and without comparisons: the baseline for the cost of the always-on checks.

Do not train with it: mismatched collectives are not detected. The watchdog thread of each rank, which answers the other
ranks, keeps running; it waits in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from minifsdp.engine.collectives import Collective
from minifsdp.engine.rank_checks import RankChecks

__all__ = ["without_ledger"]


def _issue(
    self: Collective, kind: str, group: Any, _: Any, issue: Callable[..., Any], *arguments: Any, **__: Any
) -> None:
    self.about, self.position = kind, (group.sequence, 0, 0)
    self._work = issue(*arguments)


def _wait(self: Collective) -> None:
    if self._work is not None:
        self._work.wait()


def _nothing(*_: Any) -> None:
    """Replaces functions that record or compare."""


@contextmanager
def without_ledger() -> Iterator[None]:
    """Disables the log and the comparisons. Use it around whole iterations. Every rank must enter it."""
    with ExitStack() as stack:
        for owner, name, function in (
            (Collective, "__init__", _issue),
            (Collective, "wait", _wait),
            *((RankChecks, name, _nothing) for name in ("begin_backward", "compare", "read")),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield
