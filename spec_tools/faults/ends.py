"""The end of a rank's program."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

__all__ = ["ends_as_python_does"]


def through_first_frame(trace: TracebackType | None) -> TracebackType:
    """The traceback of an exception that also passed through the first frame of the process, like an uncaught one."""
    first = sys._getframe()
    while first.f_back is not None:
        first = first.f_back
    return TracebackType(trace, first, first.f_lasti, first.f_lineno)


def ends_as_python_does(main: Callable[[], None]) -> None:
    """Runs ``main`` and ends the process.

    The harness forks ranks from another process, and they end with ``_exit``. This function does what Python does at
    the end: it handles an uncaught exception and runs the exit handlers.
    """
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException as error:
        sys.last_value, sys.last_traceback = error, through_first_frame(error.__traceback__)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
