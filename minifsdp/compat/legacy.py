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


def policy_by_either_name(policy: Any, old: dict[str, Any]) -> Any:
    """The policy of a constructor call, with the current or the deprecated keyword.

    Args:
        policy: the value of ``auto_wrap_policy``.
        old: the other keywords of the call.

    Raises:
        TypeError: if both keywords are given, or another one that does not exist.
    """
    name, new = "fsdp_auto_wrap_policy", "auto_wrap_policy"
    for unknown in old.keys() - {name}:
        raise TypeError(f"FullyShardedDataParallel.__init__() got an unexpected keyword argument {unknown!r}")
    if name not in old:
        return policy
    if policy is not None:
        raise TypeError(message("both-spellings", old=name, new=new))
    warn_renamed(f"{name}=", f"{new}=")
    return old[name]
