"""How the package speaks when something is wrong.

Sixteen ranks write into one terminal, and the one that fails first is mostly not the one that is read first. So every
error and every warning begins with the rank that has raised it; then it says what is wrong with which module or
parameter, and what to do; and it ends with the address of its entry in the documentation, and with the command that
prints this entry:

    rank 3: parameter 'head.weight' is the same as 'embed.weight' of a unit that was wrapped before. A parameter cannot
    be tied across units, the copies would drift apart; wrap a module that contains both of its users
    More in the documentation of minifsdp: troubleshoot.html#E-tied-across-units, or run: python -m minifsdp
    explain-error E-tied-across-units

What is said stands in ``messages.toml``, one text for each entry, with names in braces for what differs. So the code
says in one line that something is refused, and the page "Troubleshoot" is made from the same texts:

    raise ValueError(message("tied-across-units", path="head.weight", other="embed.weight"))

*In torch:* a message is a plain text; which rank has raised it can be seen only if the launcher says so.

Spec: START-05, and every row that asks for a clear error.
"""

import sys
import threading
import tomllib
import warnings
from functools import cache
from pathlib import Path
from types import CodeType

import torch.distributed as dist

PAGE = "troubleshoot.html"
MORE = "More in the documentation of minifsdp"
COMMAND = "or run: python -m minifsdp explain-error E-"
NOT_THE_PROGRAM = ("minifsdp", "torch", "contextlib", "threading", "codecs", "importlib")


def rank_of_this_process() -> int:
    """The global rank, for messages; 0 where there is no default group."""
    return dist.get_rank() if dist.is_initialized() else 0


def message(entry: str, /, **values: object) -> str:
    """The text of ``entry`` with ``values`` in the places of its braces, this rank before it, its address behind it."""
    text = texts()["message"][entry].format(**values)
    return f"rank {rank_of_this_process()}: {text}\n{MORE}: {PAGE}#E-{entry}, {COMMAND}{entry}"


def detail(entry: str, /, **values: object) -> str:
    """A line about one value in a message about many, which has rank and address itself."""
    return texts()["detail"][entry].format(**values)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns, and points to the line of the program that led here: the last one outside of this package and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_PROGRAM:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def way_out_of_main_thread() -> tuple[CodeType | None, CodeType | None, int | None]:
    """What the program has called in the main thread, and where that was: the code, and the number of its line.

    No frame: it would keep the tensors of a function alive that has returned meanwhile.
    """
    inside = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_PROGRAM:
        inside, frame = frame, frame.f_back
    return inside and inside.f_code, frame and frame.f_code, frame and frame.f_lineno


def warn_renamed(old: str, new: str) -> None:
    """The one warning that every old spelling gives."""
    warn(message("old-spelling", old=old, new=new), FutureWarning)


@cache
def texts() -> dict[str, dict[str, str]]:
    """All texts, by kind and entry. They are read when the first is needed, which in most runs is never."""
    with (Path(__file__).parents[1] / "messages.toml").open("rb") as file:
        return tomllib.load(file)
