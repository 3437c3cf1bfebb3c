"""Getting along with ``torch.compile``: it is told to step over this package.

The compiler records Python code as a graph. Gathering, freeing and hooks are not for a graph: they change what tensors
*are* between two operations. So both doors ask to be stepped over. The compiler leaves the code of this package alone
and compiles what the user has written between two of its hooks::

    before    (this package)    gather, show the full parameters
    forward   (the user)        recorded, compiled, run
    after     (this package)    free, lay trip wires

For a model of many equal blocks nothing is lost by that; a block is compiled once and used many times.

A compiled block looks up its parameters by name each time it runs. With DTensors, or ``use_orig_params=True``, it finds
a view there, as if nothing were sharded. With a flat parameter it finds a plain tensor where it saw a stand-in before,
compiles again and again, and gives up; so that is worth a warning.

``torch.compile(block)`` makes a new module that goes past its own child: it calls the block's code directly. A wrapper
that a policy puts around the block would never be called, so that is refused; ``block.compile()`` has no such effect.

*In torch:* the wrapper is on the compiler's own list of code to step over; the hooks of ``fully_shard`` are marked one
by one.

Spec: ORIG-07, TRAIN-25.
"""

from __future__ import annotations

import functools
import sys

from torch import nn

from minifsdp.engine.messages import message, warn


@functools.cache
def step_over_this_package() -> None:
    """Puts ``minifsdp`` on the compiler's list of code that it does not record; once in a process."""
    from torch._dynamo import trace_rules

    trace_rules.add("minifsdp")


def warn_if_compiled(hides_originals: bool) -> None:
    """Called at the first forward: says what a compiled model needs, if this one does not have it."""
    if not hides_originals or "torch._dynamo" not in sys.modules:
        return
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if callable(get_eval_frame_callback()):
        warn(message("compiled-flat"))


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` has made of another module."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)
