"""Events of a training step, for observers, and the transport between CPUs.

The engine trains a model without observers. The checks in ``minifsdp/checks`` are observers: they compare the ranks,
log collectives and inspect optimizers. `minifsdp.checks.attach` adds them to `events`. An event without an observer
costs one call of a small function, or a loop over an empty list.

An observer of one root is an object with these methods:

=======================  ============================================================================================
``forward_begins``       an outermost forward begins; gets the units of the root; may raise an error
``backward_begins``      a backward begins; gets autograd's ID of it, -1 outside of autograd
``backward_ends``        the last backward of an iteration ends, and its last reduction may be in flight; gets the
                         `IterationState`
``reduced``              this reduction is complete
``left``                 an outermost forward or a backward has ended, maybe by an exception
=======================  ============================================================================================

An observer of a barrier is an object with these attributes:

=======================  ============================================================================================
``order``                a text that must be equal on all ranks
``wait``                 calls a function that waits for the other ranks; gets the function and its arguments
``is_over``              whether the wait must end, because the other ranks cannot arrive
``undo``                 a rank has not arrived; returns a report for the error
``begin_epoch``          the texts of the ranks differ; returns a report for the error
=======================  ============================================================================================

An observer of optimizers is an object with these methods:

=======================  ============================================================================================
``sharded``              modules were sharded; gets pairs of path and module
``unreduced``            the gradients of a unit are kept for a later reduction; gets its layout
``new_optimizer``        an optimizer steps for the first time, its groups have changed, or there is a new unit; gets
                         the optimizer, the layouts whose parameters it holds, and all layouts
``step_begins``          a step begins; gets the layouts whose parameters the optimizer holds
``gradients_ready``      the optimizer reads the gradients next; gets the optimizer and these layouts
=======================  ============================================================================================

Worked example, one unit of ``FullyShardedDataParallel`` that is sharded over two ranks, one iteration. A collective is
a call of `Events.collective`::

    sharded                      once
    forward_begins
        collective               the all-gather
    left
    backward_begins
        collective               the reduce-scatter; the root stays unsharded after forward
    backward_ends, reduced, left
    new_optimizer                once
    step_begins, gradients_ready

A transport sends CPU tensors instead of a process group. ``minifsdp/__init__.py`` attaches it. Without a transport, the
process group sends all tensors. It is an object with these methods:

===========================  ========================================================================================
``all_gather_single``        as the method of the process group; before torch 2.13 also ``_allgather_base``
``reduce_scatter_single``    as the method of the process group; before torch 2.13 also ``_reduce_scatter_base``
``sends_each``               whether ``all_gather_each`` is faster for these outputs than an all-gather and a copy-out
``all_gather_each``          all-gathers several tensors, each directly into its own output
===========================  ========================================================================================

The checks use three more methods: ``check_size`` before each collective, ``forget_sizes`` after a mismatch, and
``all_gather_apart`` for the comparison of the ranks.

*In torch:* no events. FSDP1 has checks in its step that the debug level of ``torch.distributed`` turns on.

Spec: NEW-19, LEDGER-01.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn


class Handle(Protocol):
    """The handle of work that was issued and is complete when `wait` has returned."""

    def wait(self) -> Any:
        """Call this before the compute stream uses the result."""


# A completed handle: nothing was issued, or the work is already ordered on the waiting stream.
COMPLETED: Handle = torch.cpu.Event()


def issue(
    kind: str,
    group: Any,
    data: Sequence[torch.Tensor],
    method: Callable[..., Any],
    arguments: Sequence[Any] = (),
    unit: str | None = None,
    parts: Sequence[int] = (),
) -> Handle:
    """Issues a collective without an observer.

    Args:
        kind: the name of the collective.
        group: the `Group`; all of its ranks must issue the same collective.
        data: the input or the output, whichever is larger; empty if it is not a tensor.
        method: the function that issues the collective. It returns a handle or ``None``.
        arguments: arguments of ``method``.
        unit: the name of the unit, if the collective belongs to a unit.
        parts: the numbers of the parameters whose gradients are in ``data``.
    """
    return method(*arguments) or COMPLETED


class Events:
    """The observers of the process, and its transport. There is one object, `events`.

    Attributes:
        collective: the function that issues each collective and returns its handle: `issue`, or an observer with the
            same arguments.
        barrier: a function that gets a group, before its ranks wait for each other to save or load a state dict, and
            returns an observer of this barrier. ``None`` without an observer.
        before_state_dict: functions to call before a state dict is saved or loaded.
        states: functions that get each new state of ``fully_shard``; one of them is in ``checkpoint/loading.py``.
        roots: functions that get the units of a new root and return an observer of this root.
        optimizers: observers of optimizers.
        transport: returns the transport for the CPU tensors of a process group, or ``None``.
        last_event: the accelerator event after the last work on a communication stream.
        recorder: the `Recorder` of ``debugging/trace.py`` that is installed, or ``None``.
    """

    def __init__(self) -> None:
        self.collective: Callable[..., Handle] = issue
        self.barrier: Callable[[Any], Any] | None = None
        self.before_state_dict: list[Callable[[], None]] = []
        self.states: list[Callable[[Any], None]] = []
        self.roots: list[Callable[[Sequence[Any]], Any]] = []
        self.optimizers: list[Any] = []
        self.transport: Callable[[Any], Any] = lambda process_group: None
        self.last_event: Any = None
        self.recorder: Any = None

    def sharded(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Called when ``modules``, with their paths, become a unit."""
        for observer in self.optimizers:
            observer.sharded(modules)


events = Events()
