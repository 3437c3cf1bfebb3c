"""Getting along with ``torch.compile``: it is told to step over this package.

The compiler records Python code as a graph. Gathering, freeing and hooks are not for a graph: they change what tensors
*are* between two operations. So both doors ask to be stepped over. The compiler leaves the code of this package alone
and compiles what the user has written between two of its hooks::

    before    (this package)    gather, show the full parameters
    forward   (the user)        recorded, compiled, run
    after     (this package)    free, lay trip wires

For a model of many equal blocks nothing is lost by that; a block is compiled once and used many times.

*In torch:* the wrapper is on the compiler's own list of code to step over; the hooks of ``fully_shard`` are marked one
by one.

Spec: ORIG-07, TRAIN-25.
"""

import functools


@functools.cache
def step_over_this_package() -> None:
    """Puts ``minifsdp`` on the compiler's list of code that it does not record; once in a process."""
    from torch._dynamo import trace_rules

    trace_rules.add("minifsdp")
