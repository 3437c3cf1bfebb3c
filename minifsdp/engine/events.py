"""Events of a training step, for observers.

The engine trains a model without observers. The checks in ``minifsdp/checks`` are observers: they compare the ranks,
log collectives and inspect optimizers. `minifsdp.checks.attach` adds them to `events`. An event without an observer
costs one test of an attribute, or a loop over an empty list.

An observer of one root is an object with these methods:

=======================  ============================================================================================
``forward_begins``       an outermost forward begins
``backward_begins``      a backward begins; gets autograd's ID of it, -1 outside of autograd
``backward_ends``        the last backward of an iteration ends, and its last reduction may be in flight; gets the
                         `IterationState`
``reduced``              this reduction is complete
``left``                 an outermost forward or a backward has ended, maybe by an exception
=======================  ============================================================================================

An observer of optimizers is an object with these methods:

=======================  ============================================================================================
``sharded``              modules become a unit; gets pairs of path and module
``unreduced``            the gradients of a unit are kept for a later reduction; gets its layout
``new_optimizer``        an optimizer steps for the first time, its groups have changed, or there is a new unit; gets
                         the optimizer, the layouts whose parameters it holds, and all layouts
``step_begins``          a step begins; gets the layouts whose parameters the optimizer holds
``gradients_ready``      the optimizer reads the gradients next; gets the optimizer and these layouts
=======================  ============================================================================================

Worked example, one unit that is sharded over two ranks, one iteration::

    sharded                      once
    forward_begins
        collective               the all-gather
    left
    backward_begins
        collective, collective   the all-gather and the reduce-scatter
    backward_ends, reduced, left
    step_begins, gradients_ready

*In torch:* no events. FSDP1 has checks in its step that the debug level of ``torch.distributed`` turns on.

Spec: NEW-19, LEDGER-01.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn


class Events:
    """The observers of the process. There is one object, `events`.

    Attributes:
        collective: the function that issues each collective and returns its handle. It has the arguments of
            `issue_unobserved` in ``collectives.py``. ``None`` without an observer.
        roots: functions that get the units of a new root and return an observer of this root.
        optimizers: observers of optimizers.
        last_event: the accelerator event after the last work on a communication stream.
    """

    def __init__(self) -> None:
        self.collective: Callable[..., Any] | None = None
        self.roots: list[Callable[[Sequence[Any]], Any]] = []
        self.optimizers: list[Any] = []
        self.last_event: Any = None

    def sharded(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Called when ``modules``, with their paths, become a unit."""
        for observer in self.optimizers:
            observer.sharded(modules)


events = Events()
