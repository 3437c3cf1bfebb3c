"""Spellings of torch 1.11 to 1.13 that are still understood, each with one ``FutureWarning``.

A script from 2022 says ``fsdp_auto_wrap_policy=`` where one says ``auto_wrap_policy=`` today. The old word is
translated before the constructor sees it, so the constructor's own signature stays that of today. What has not been
renamed but *moved* is not guessed at: a ``CPUOffload`` in the third position, where it stood in 1.11, ends in a
``TypeError`` that names the keyword.

*In torch:* none of these exists any more; an old keyword ends in a ``TypeError``.

Spec: LEGACY-01 to LEGACY-05, NAMES-09.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from minifsdp.engine.messages import message, warn_renamed

P = ParamSpec("P")
S = TypeVar("S")

RENAMED_KEYWORDS = {"fsdp_auto_wrap_policy": "auto_wrap_policy"}


def takes_old_spellings(constructor: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Lets a constructor be called with keywords that it no longer has.

    Raises:
        TypeError: the old and the new spelling of one argument were given.
    """

    @functools.wraps(constructor)
    def translated(self: S, /, *args: Any, **kwargs: Any) -> None:
        for old, new in RENAMED_KEYWORDS.items():
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(message("both-spellings", old=old, new=new))
                warn_renamed(f"{old}=", f"{new}=")
                kwargs[new] = kwargs.pop(old)
        constructor(self, *args, **kwargs)

    return translated
