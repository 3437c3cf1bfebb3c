"""Captures of graphs: which calls of which thread make a capture invalid.

While a thread captures a stream, calls that ask for or wait for the state of the device are not allowed: the query of
an event or a stream, and every stop of the CPU. Such a call raises an error, and the capture raises one when it ends.
Whether a call is allowed depends on the mode of the capture and on the mode of the calling thread, as in CUDA:

====================  ==========================================================================================
mode of the thread     not allowed during
====================  ==========================================================================================
global, the default    its own captures, except relaxed ones, and captures of other threads in the mode global
thread local           its own captures, except relaxed ones
relaxed                no capture
====================  ==========================================================================================

Operators inside a capture are executed at once, and recorded on the capturing stream. A graph cannot be replayed.

*In torch:* ``torch.cuda.graph``; the modes are ``cudaStreamCaptureMode``, set by
``cudaThreadExchangeStreamCaptureMode``.

Spec: SIM-15.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["MODES", "Captures"]

MODES = ("global", "thread_local", "relaxed")
"""In the order of their numbers in CUDA."""


@dataclass
class Capture:
    """One capture.

    Attributes:
        thread: which began it.
        mode: one of `MODES`.
        error: the call that made it invalid; empty while it is valid.
    """

    thread: int
    mode: str
    error: str = ""


class Captures:
    """The captures of all threads that have not ended."""

    def __init__(self) -> None:
        self._running: list[Capture] = []
        self._local = threading.local()

    def exchange_mode(self, mode: str) -> str:
        """Sets the mode of this thread. Returns the previous one."""
        before: str = getattr(self._local, "mode", MODES[0])
        self._local.mode = mode
        return before

    def begin(self, mode: str) -> Capture:
        """Begins a capture of this thread."""
        if mode not in MODES:
            raise ValueError(f"the capture mode {mode} is none of {MODES}")
        capture = Capture(threading.get_ident(), mode)
        self._running.append(capture)
        return capture

    def end(self, capture: Capture) -> None:
        """Ends a capture.

        Raises:
            RuntimeError: it is invalid.
        """
        self._running.remove(capture)
        if capture.error:
            raise RuntimeError(f"operation failed due to a previous error during capture: {capture.error}")

    def is_own(self) -> bool:
        """Whether this thread captures."""
        return any(capture.thread == threading.get_ident() for capture in self._running)

    def refuse(self, call: str) -> None:
        """Called before a call that is not allowed during captures.

        Raises:
            RuntimeError: there is such a capture. It is invalid from now on.
        """
        if not self._running:
            return
        mode, here = getattr(self._local, "mode", MODES[0]), threading.get_ident()
        hit = [one for one in self._running if _forbids(one, mode, is_own=one.thread == here)]
        for capture in hit:
            capture.error = capture.error or call
        if hit:
            raise RuntimeError(f"operation not permitted when stream is capturing: {call}")


def _forbids(capture: Capture, mode_of_thread: str, *, is_own: bool) -> bool:
    if mode_of_thread == "relaxed":
        return False
    if is_own:
        return capture.mode != "relaxed"
    return mode_of_thread == "global" and capture.mode == "global"
