"""Support for ``torch.compile``: the compiler does not trace this package.

The compiler records Python code as a graph. A graph cannot contain all-gathers, reshards and hooks, because they change
the memory of tensors between two operations. So both APIs exclude this package from tracing. The compiler compiles the
user's code between two hooks of this package::

    before    (this package)    all-gather, assign the unsharded parameters
    forward   (the user)        recorded, compiled, run
    after     (this package)    reshard, register backward hooks

In a model of many equal blocks, this has no cost: a block is compiled once and used many times.

*In torch:* the wrapper is on the compiler's own list of code to skip; the hooks of ``fully_shard`` are marked one by
one.

Spec: ORIG-07, TRAIN-25.
"""

import functools


@functools.cache
def step_over_this_package() -> None:
    """Adds ``minifsdp`` and its transport to the compiler's list of code to skip; once in a process."""
    from torch._dynamo import trace_rules

    trace_rules.add("minifsdp")
    trace_rules.add("minifsdp_gloo")
