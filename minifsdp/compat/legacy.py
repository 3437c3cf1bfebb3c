"""Spellings of torch 1.11 to 1.13 that are still understood, each with one ``FutureWarning``.

A script from 2022 says ``fsdp_auto_wrap_policy=`` where one says ``auto_wrap_policy=`` today. The old word is
translated before the constructor sees it, so the constructor's own signature stays that of today. What has not been
renamed but *moved* is not guessed at: a ``CPUOffload`` in the third position, where it stood in 1.11, ends in a
``TypeError`` that names the keyword.

*In torch:* none of these exists any more; an old keyword ends in a ``TypeError``.

Spec: LEGACY-01 to LEGACY-05, NAMES-09.
"""

from typing import Any

from minifsdp.engine.messages import message, warn_renamed


def in_todays_spelling(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a constructor's call, as the constructor of today knows them.

    Raises:
        TypeError: the old and the new spelling of one argument were given.
    """
    old, new = "fsdp_auto_wrap_policy", "auto_wrap_policy"
    if old in kwargs:
        if new in kwargs:
            raise TypeError(message("both-spellings", old=old, new=new))
        warn_renamed(f"{old}=", f"{new}=")
        kwargs[new] = kwargs.pop(old)
    return kwargs
