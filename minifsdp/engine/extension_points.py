"""The points of a training step at which a case runs code of its own.

The engine trains models whose graph is simple: the loss depends on the output of the root, each unit's parameters are
used in its forward, and one backward follows. A *case* is a rare situation beyond that, for example a unit that returns
its parameters. Each case of a step is a class in ``minifsdp/cases``. The front end passes the classes to the root
state, which creates one object of each. The object adds its methods to the lists of `ExtensionPoints`. The step calls
them, and ``summon_full_params`` those of one point. The engine knows no case.

Worked example, one step with one unit that is resharded after forward, and the points in the order of their calls::

    forward_begins
        (forward of the unit)   unit_output   unit_reshards
    forward_ends
    backward_begins
        unit_backward           (backward of the unit)   unit_reshards
    backward_ends

A unit that a case holds has ``held_gradient`` instead of ``unit_reshards``, and ``unit_reshards`` after
``backward_ends``. A case may set `Unit.is_held`. The unit then stays unsharded until the end of the backward that
computes its gradients.

*In torch:* no extension points. FSDP1 and FSDP2 have no code for most of these cases.

Spec: PROG-20 to PROG-29, PROG-32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifsdp.engine.layout import Gradient
    from minifsdp.engine.root import RootState
    from minifsdp.engine.unit import Unit

# Creates the object of a case for one root, which adds its methods to the extension points of this root.
Case = Callable[["RootState"], object]


class ExtensionPoints:
    """The functions that cases have added to the training step of one root. Each list is called in order.

    Attributes:
        forward_begins: an outermost forward begins.
        unit_output: the module of a unit has run. Gets the unit and the output, and returns the output to use.
        forward_ends: an outermost forward ends. Gets its output, and returns the output to use.
        backward_begins: a backward begins. No unit has been all-gathered for it.
        unit_backward: the backward of a unit begins. The function gets the unit. It may raise an error.
        held_gradient: the gradients of the parameters of a held unit are complete. Gets the unit and the gradients.
        backward_ends: the last node of a backward has run. The function returns whether it ends this backward
            in another way. Then no later function is called, and the iteration does not end.
        unit_reshards: a unit is resharded. If it is not sharded already, its unsharded parameters still have values.
        values_written: the user may have written to the full parameters of this unit.
    """

    def __init__(self) -> None:
        self.forward_begins: list[Callable[[], None]] = []
        self.unit_output: list[Callable[[Unit, Any], Any]] = []
        self.forward_ends: list[Callable[[Any], Any]] = []
        self.backward_begins: list[Callable[[], None]] = []
        self.unit_backward: list[Callable[[Unit], None]] = []
        self.held_gradient: list[Callable[[Unit, Gradient], None]] = []
        self.backward_ends: list[Callable[[], bool]] = []
        self.unit_reshards: list[Callable[[Unit], None]] = []
        self.values_written: list[Callable[[Unit], None]] = []
