"""Deprecated keywords of torch 1.11 to 1.13 that still work, each with one ``FutureWarning``.

A script from 2022 passes ``fsdp_auto_wrap_policy=``, which is now ``auto_wrap_policy=``. The old keyword is renamed
before the constructor is called, so the constructor has only the current signature. Arguments whose *position* changed
are not converted: a ``CPUOffload`` in the third position, which is where torch 1.11 had it, raises a ``TypeError`` that
names the keyword.

*In torch:* these keywords no longer exist; using one raises a ``TypeError``.

Spec: LEGACY-01 to LEGACY-05, NAMES-09.
"""

from typing import Any

from minifsdp.engine.messages import message, warn_renamed


def in_todays_spelling(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Renames deprecated keywords of a constructor call to the current ones.

    Raises:
        TypeError: if both the old and the new name of an argument are given.
    """
    old, new = "fsdp_auto_wrap_policy", "auto_wrap_policy"
    if old in kwargs:
        if new in kwargs:
            raise TypeError(message("both-spellings", old=old, new=new))
        warn_renamed(f"{old}=", f"{new}=")
        kwargs[new] = kwargs.pop(old)
    return kwargs
