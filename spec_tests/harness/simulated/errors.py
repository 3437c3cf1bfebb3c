"""What a hook raises in backward, which torch would lose on the way out.

Autograd guards the current device, and a guard on its way out asks for the device's type. For a backend written in
Python that question is a call of Python; with an exception on its way through the same C++ frames the call fails for
the sake of the exception, the guard may not fail, and the process ends with "terminate called". So:

1. whoever asks for the type first calls `keep_pending`, which takes the exception out of its way and keeps it;
2. backward then ends with "returned NULL without setting an exception" (a ``SystemError``), and `EngineWithErrors`
   raises the one that was kept in its place.

A GPU's guards are C++ and know nothing of this; what a program sees is the same.

Spec: SIM-01.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch.autograd.variable import Variable

__all__ = ["EngineWithErrors", "keep_pending", "watch_backward"]

_kept: list[BaseException] = []

# Calls through `pythonapi` raise what is pending when they return; which function that is does not matter.
_raise_pending = ctypes.pythonapi.PyErr_Occurred


def keep_pending() -> None:
    """Takes an exception that is on its way through C++, if there is one, out of the way of calls of Python."""
    try:
        _raise_pending()
    except BaseException as error:
        _kept.append(error)


class EngineWithErrors:
    """The engine of autograd; its backward raises what was kept."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *arguments: Any, **named: Any) -> Any:
        """As the engine's own."""
        _kept.clear()
        try:
            return self._engine.run_backward(*arguments, **named)
        except SystemError:
            if not _kept:
                raise
        try:
            # The first one: others may have followed from it.
            raise _kept[0]
        finally:
            _kept.clear()


def watch_backward() -> None:
    """From now on in this process."""
    Variable._execution_engine = EngineWithErrors(Variable._execution_engine)  # type: ignore[assignment]
