"""The place of a call in the program: the line from which this package was called.

Worked example: line 12 of ``train.py`` calls ``loss.backward()``, which calls a hook of this package. The place is the
code of ``train.py`` and the number 12, and the function that it has called is ``backward``.

*In torch:* the flight recorder stores the whole stack of each collective.

Spec: LEDGER-02.
"""

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

from minifsdp.engine.messages import NOT_THE_PROGRAM

Place = tuple[CodeType | None, CodeType | None, int | None]


def way_out(frame: FrameType | None) -> Place:
    """The place in the program from which ``frame`` was called.

    Generated code, for example of ``torch.fx``, has no module name, and belongs to the program. Returns code objects
    and not frames. A frame would keep a function's tensors alive after the function has returned.

    Returns:
        The function that the program has called, the code that called it, and its line number.
    """
    inside = frame
    while (
        frame
        and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_PROGRAM
    ):
        inside = frame
        frame = frame.f_back
    return inside and inside.f_code, frame and frame.f_code, frame and frame.f_lineno


def way_out_of_main_thread() -> Place:
    """The place in the program where the main thread is."""
    return way_out(sys._current_frames().get(threading.main_thread().ident or 0))


def where(code: CodeType | None, line: int | None) -> str:
    """A line of the program, ``train.py:88``."""
    return f"{Path(code.co_filename).name}:{line}" if code else "a thread of autograd"


def called(code: CodeType | None) -> str:
    """The function that the program called: ``forward``, ``backward``, ``state_dict``, ``Linear()``."""
    if code is None:
        return "a thread"
    if code.co_name == "__call__" or code.co_name.endswith("_call_impl"):
        return "forward"
    return (
        f"{code.co_qualname.split('.')[-2:][0]}()"
        if code.co_name == "__init__"
        else code.co_name
    )


def place_as_text(
    inside: CodeType | None, code: CodeType | None, line: int | None
) -> str:
    """A `Place` as text: ``in forward, train.py:88``; without a function if the program called none."""
    if code is None:
        return "outside of the program"
    at = where(code, line)
    return at if inside in (None, code) else f"in {called(inside)}, {at}"
