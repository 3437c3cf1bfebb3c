"""Error messages and warnings of the package.

Many ranks write to one terminal, and the first error in the output is usually not the first that occurred. So every
error and warning begins with the rank that raises it. Then it describes the problem, the module or parameter, and the
fix. It ends with the address of its entry in the documentation, and with the command that prints this entry:

    rank 3: parameter 'head.weight' is the same as 'embed.weight' of a unit that was wrapped before. A parameter cannot
    be tied across units, the copies would drift apart; wrap a module that contains both of its users as one unit, and
    neither of them alone
    More in the documentation of minifsdp: troubleshoot.html#E-tied-across-units, or run: python -m minifsdp
    explain-error E-tied-across-units

``messages.toml`` contains one text for each entry, with names in braces for the values that vary. So the code needs one
line for each error. The page "Troubleshoot" is generated from the same texts:

    raise ValueError(message("tied-across-units", path="head.weight", other="embed.weight"))

*In torch:* a message is plain text; it contains the rank only if the launcher adds it.

Spec: START-05, and every requirement of a clear error.
"""

import sys
import tomllib
import warnings
from functools import cache
from pathlib import Path

import torch.distributed as dist

PAGE = "troubleshoot.html"
MORE = "More in the documentation of minifsdp"
COMMAND = "or run: python -m minifsdp explain-error E-"
NOT_THE_PROGRAM = (
    "minifsdp",
    "minifsdp_gloo",
    "minifsdp_tools",
    "torch",
    "contextlib",
    "threading",
    "codecs",
    "importlib",
)


def rank_of_this_process() -> int:
    """The global rank, for messages; 0 if there is no default process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def message(entry: str, /, **values: object) -> str:
    """The text of ``entry`` with ``values`` for its braces, after this rank and before its address."""
    text = texts()["message"][entry].format(**values)
    return f"rank {rank_of_this_process()}: {text}\n{MORE}: {PAGE}#E-{entry}, {COMMAND}{entry}"


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at a line of the program: the innermost frame outside of minifsdp and torch."""
    level = 2
    frame = sys._getframe(1)
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_PROGRAM
    ):
        level = level + 1
        frame = frame.f_back
    warnings.warn(text, category, stacklevel=level)


@cache
def texts() -> dict[str, dict[str, str]]:
    """All texts, by kind and entry. The file is read when a text is first needed. Most runs never need one."""
    with (Path(__file__).parents[1] / "messages.toml").open("rb") as file:
        return tomllib.load(file)
