"""One passage of a text, exchanged for another: how the package is broken on purpose."""

from __future__ import annotations

__all__ = ["exchanged"]


def exchanged(text: str, old: str, new: str, where: str) -> str:
    """``text`` with ``new`` in place of ``old``, which has to stand there exactly once.

    Raises:
        ValueError: it does not; the code was changed, and what breaks it must be written anew. ``where`` says where.
    """
    if text.count(old) != 1:
        raise ValueError(f"the passage is {text.count(old)} times in {where}, not once:\n{old}")
    return text.replace(old, new)
