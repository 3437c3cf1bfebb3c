"""Replaces one passage of a text. Tests use it to break the package on purpose."""

from __future__ import annotations

__all__ = ["exchanged"]


def exchanged(text: str, old: str, new: str, where: str) -> str:
    """Returns ``text`` with ``old`` replaced by ``new``. ``old`` must occur exactly once.

    Raises:
        ValueError: it does not; the code was changed, so the replacement must be updated. The message names ``where``.
    """
    if text.count(old) != 1:
        raise ValueError(f"the passage is {text.count(old)} times in {where}, not once:\n{old}")
    return text.replace(old, new)
