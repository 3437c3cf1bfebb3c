"""A list of modules as the argument of ``fully_shard``: several modules share one unit.

A final norm and an output layer run one after the other. One all-gather for both is faster than two small ones::

    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.output])
    fully_shard(model)
    for batch in batches:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

Without this case, the unit is all-gathered before each of these modules and resharded after each of them. If a forward
calls only some of the modules, a backward can use freed parameters of the others.

The case is a subclass of `FSDPState`. The unit is all-gathered before the first module runs, and resharded after the
last one.

*In torch:* ``FSDPState`` has a set of the modules that have not run yet.

Spec: NEW-04.
"""

from typing import Any

from torch import nn

from minifsdp.engine.hooks import IterationState
from minifsdp.engine.unit import Phase, Unit
from minifsdp.fsdp2.fsdp_state import FSDPState


class StateOfList(FSDPState):
    """The state of a ``fully_shard`` call with several modules. It has the arguments of `FSDPState`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Modules that have not run yet in the current forward, and the number of that forward.
        self._waiting: set[nn.Module] = set()
        self._waits_in = 0
        self._is_recorded = False

    @staticmethod
    def takes(modules: list[nn.Module]) -> bool:
        """Whether this class is the state of these modules."""
        return len(modules) > 1

    def _is_between(self, iteration: IterationState) -> bool:
        """Whether another module of this state has already run, and all-gathered the unit, in this forward."""
        return bool(self._waiting) and self._waits_in == iteration.num_forwards

    def begins_unit(self, iteration: IterationState, unit: Unit) -> bool:
        """Whether no other module of this state has run in this forward, or the forward is a recomputation."""
        if unit.phase is Phase.PRE_BACKWARD:
            return True
        if self._is_between(iteration):
            return False
        # The latest forward may have failed between the modules.
        self._waiting = set(self.modules)
        self._waits_in = iteration.num_forwards
        self._is_recorded = False
        return True

    def leave(
        self,
        iteration: IterationState,
        unit: Unit,
        modules: set[nn.Module],
        inputs: Any,
        output: Any,
    ) -> Any:
        """Registers hooks on the output of each module, because any of them can be the last to run."""
        output, is_recorded = iteration.hook_output(unit, inputs, output)
        self._is_recorded |= is_recorded
        self._waiting -= modules
        if not self._waiting:
            iteration.leave_forward(unit, is_recorded=self._is_recorded)
        return output

    def end_forward(self, iteration: IterationState, inputs: Any, output: Any) -> Any:
        """Ends the forward of the unit if some modules were not called.

        The model may use their parameters anyway, and backward may reach them before it reaches an output of the
        other modules.
        """
        if self.unit is not None and self._is_between(iteration):
            return self.leave(iteration, self.unit, self._waiting, inputs, output)
        return output

    def break_off(self) -> None:
        """Resets the root state after an exception."""
        self._waiting.clear()
        super().break_off()
