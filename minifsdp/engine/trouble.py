"""How the package speaks when something is wrong.

Sixteen ranks write into one terminal, and the one that fails first is mostly not the one that is read first. So every
error and every warning begins with the rank that has raised it; then it says what is wrong with which module or
parameter, and what to do; and it ends with the address of its entry in the documentation, where there is room for more
words:

    rank 3: parameter 'head.weight' is the same as 'embed.weight' of a unit that was wrapped before. A parameter cannot
    be tied across units, the copies would drift apart; wrap a module that contains both of its users
    More in the documentation of minifsdp: troubleshoot.html#E-tied-across-units

The entry's name is written where the message is raised, so it stays when the wording changes. The page is made from
those places, so none is missing there (``docs_build/messages.py``).

*In torch:* a message is a plain text; which rank has raised it can be seen only if the launcher says so.

Spec: no row of its own; every row that asks for a clear error.
"""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["PAGE", "rank_of_this_process", "trouble"]

PAGE = "troubleshoot.html"


def rank_of_this_process() -> int:
    """The global rank, for messages; 0 where there is no default group."""
    return dist.get_rank() if dist.is_initialized() else 0


def trouble(entry: str, text: str) -> str:
    """The message ``text`` with its two ends: this rank before it, the address of its ``entry`` behind it."""
    return f"rank {rank_of_this_process()}: {text}\nMore in the documentation of minifsdp: {PAGE}#E-{entry}"
