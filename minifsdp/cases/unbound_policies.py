"""Auto-wrap policies whose own arguments are not bound.

A policy function gets a module and returns whether it becomes a unit. Some functions have a further argument, for
example the classes of blocks, and a program must bind it. It is easy to forget this, or to call the function instead::

    FSDP(model, auto_wrap_policy=transformer_auto_wrap_policy)                              # not bound
    FSDP(model, auto_wrap_policy=transformer_auto_wrap_policy(transformer_layer_cls={Block}))    # called
    FSDP(model, auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}))

Without this case, the first two lines raise an error of Python about a missing argument, the first one only in the
middle of wrapping. `require_call` raises a ``TypeError`` before the model is changed, and its message has the form of
the third line. `require_policy` calls it, and the policies of this package are decorated with `explains_binding`.

*In torch:* the errors of Python.

Spec: WRAP-09.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from minifsdp.engine.messages import message

P = ParamSpec("P")


def require_call(policy: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Raises the ``TypeError`` that Python would raise for this call. The message contains a fix."""
    try:
        inspect.signature(policy).bind(*args, **kwargs)
    except ValueError:
        return  # Some builtins have no signature, so only a call can check the arguments.
    except TypeError as error:
        name = getattr(policy, "__name__", repr(policy))
        own = [
            p
            for p in inspect.signature(policy).parameters
            if p not in ("module", "recurse", "nonwrapped_numel")
        ]
        raise TypeError(
            message("policy-call", name=name, error=error, own=own[0] if own else "...")
        ) from None


def explains_binding(policy: Callable[P, bool]) -> Callable[P, bool]:
    """Explains the most common mistake in the error: calling a policy instead of binding its arguments."""

    @functools.wraps(policy)
    def checked(*args: P.args, **kwargs: P.kwargs) -> bool:
        require_call(policy, *args, **kwargs)
        return policy(*args, **kwargs)

    return checked
