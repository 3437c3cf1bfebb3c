"""Keeps exceptions that a hook raises in backward, which torch would lose.

Autograd guards the current device, and a guard reads the device's type in its destructor. For a backend written in
Python this is a call to Python. If an exception is propagating through the same C++ frames, this call fails because of
it. A destructor must not fail, so the process ends with "terminate called". The solution:

1. Code that reads the type first calls `keep_pending`, which clears the pending exception and keeps it.
2. Backward then ends with "returned NULL without setting an exception" (a ``SystemError``), and `EngineWithErrors`
   raises the kept exception instead.

The guards of a GPU are C++ and do not need this. A program sees the same exception in both cases.

Spec: SIM-01.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch.autograd.variable import Variable

from spec_tests.harness.simulated.world import WORLD

__all__ = ["EngineWithErrors", "keep_pending", "watch_backward"]

_kept: list[BaseException] = []

# Any call through `pythonapi` raises the pending exception when it returns; the function does not matter.
_raise_pending = ctypes.pythonapi.PyErr_Occurred


def keep_pending() -> None:
    """Clears and keeps the exception, if any, that is propagating through C++, so that calls to Python work."""
    try:
        _raise_pending()
    except BaseException as error:
        _kept.append(error)


class EngineWithErrors:
    """Autograd's engine, whose backward raises the kept exception."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, roots: Any, *arguments: Any, **named: Any) -> Any:
        """Runs the engine's own `run_backward`, with the streams of ``backward.py``."""
        _kept.clear()
        try:
            with WORLD.backwards.followed(roots, WORLD.current_stream(0)):
                return self._engine.run_backward(roots, *arguments, **named)
        except SystemError:
            if not _kept:
                raise
        try:
            # Raise the first exception, because the others can be a consequence of it.
            raise _kept[0]
        finally:
            _kept.clear()


def watch_backward() -> None:
    """Installs `EngineWithErrors` for the rest of this process."""
    Variable._execution_engine = EngineWithErrors(Variable._execution_engine)  # type: ignore[assignment]
