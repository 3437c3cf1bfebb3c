"""The engine as it would be if it kept no ledger and compared nothing: what the always-on checks are measured against.

Not for training: a rank that sends something else is noticed by nobody. The thread of each rank that answers the others
goes on; it sleeps in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from minifsdp.engine.comparison import Comparison
from minifsdp.engine.ledger import Collective

__all__ = ["without_ledger"]


def _issue(
    self: Collective, kind: str, group: Any, _: int, issue: Callable[..., Any], *arguments: Any, **__: Any
) -> None:
    self.about, self.chain, self.epoch, self.number = kind, group.chain, 0, 0
    self._work = issue(*arguments)


def _wait(self: Collective) -> None:
    if self._work is not None:
        self._work.wait()


def _nothing(*_: Any) -> None:
    """Stands where something is written down or compared."""


@contextmanager
def without_ledger() -> Iterator[None]:
    """For whole iterations. Every rank must enter it."""
    with ExitStack() as stack:
        for owner, name, function in (
            (Collective, "__init__", _issue),
            (Collective, "wait", _wait),
            *((Comparison, name, _nothing) for name in ("begin_backward", "ask", "read")),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield
