"""Deprecated keywords of torch 1.11 to 1.13 that still work, each with one ``FutureWarning``.

A script from 2022 passes ``fsdp_auto_wrap_policy=``, which is now ``auto_wrap_policy=``. It is the last argument of the
constructor and can only be given by name. Arguments whose *position* changed are not converted: a ``CPUOffload`` in the
third position, which is where torch 1.11 had it, raises a ``TypeError`` that names the keyword.

*In torch:* these keywords no longer exist; using one raises a ``TypeError``.

Spec: LEGACY-01 to LEGACY-05, NAMES-09.
"""

from typing import Any

from minifsdp.checks.arguments import warn_renamed
from minifsdp.engine.messages import message


def policy_by_either_name(policy: Any, old: Any) -> Any:
    """The policy of a constructor call.

    Args:
        policy: the value of ``auto_wrap_policy``.
        old: the value of the deprecated keyword ``fsdp_auto_wrap_policy``.

    Raises:
        TypeError: if both are given.
    """
    if old is None:
        return policy
    if policy is not None:
        raise TypeError(
            message(
                "both-spellings", old="fsdp_auto_wrap_policy", new="auto_wrap_policy"
            )
        )
    warn_renamed("fsdp_auto_wrap_policy=", "auto_wrap_policy=")
    return old
