"""Where the machine touches autograd: four moments of a unit, and the end of backward.

::

    pre_forward      gather, ask for the next one's gather, wait, show the full parameters
      (the module)
    post_forward     free, and lay a trip wire on the output
    pre_backward     the trip wire: the gradient of the output has arrived. Gather, prefetch, wait, show
      (autograd)
    post_backward    the gradient of all parameters is complete. Free, prefetch, reduce
    end_backward     autograd is done. Complete the last reduction, tidy up

How do we get into backward?

1. *Pre-backward* is a hook on the tensors that forward returned. They are new each time, so each forward lays it.
2. *Post-backward* is told by the unit's *trigger*, its leaf or its inputs; nothing here asks which (``triggers.py``).
3. *End of backward* is a callback that autograd runs after its last node. It can only be queued from inside a backward,
   so the first trip wire does it. What no trigger could tell is caught there.

Activation checkpointing runs a unit's forward *again, inside backward*. That is noticed by the fact that autograd is
running, and changes two things:

4. a forward in the phase PRE_BACKWARD only needs to look: the unit is gathered, its backward is waiting for the result.
5. a forward in another phase is gathered as usual but not freed after it, because what runs next is its own backward.
   The unit *lingers* until then; if another one's turn comes instead, it is freed after all. The same holds for a unit
   whose gradient completes inside a nested backward (reentrant checkpointing of a part of the unit): another part may
   yet have to be computed again from the same parameters.

*In torch:* ``_runtime_utils.py``, 1654 lines. It gathers a third time where point 5, in its reentrant case, needs two.

Spec: SHARD-04, SHARD-08, SHARD-10, SHARD-14, FWD-06, PREF-02 to PREF-06, NOSYNC-01, NOSYNC-07, PAR-07.
"""

from typing import Any

import torch
from torch.autograd import Variable

from minifsdp import trace
from minifsdp.engine.comparison import Comparison
from minifsdp.engine.layout import Gradient
from minifsdp.engine.order_check import OrderCheck
from minifsdp.engine.reduce import Reducer
from minifsdp.engine.schedule import BackwardPrefetch, Schedule
from minifsdp.engine.triggers import NOT_IN_BACKWARD, graph_task, lay_wires, trigger_for
from minifsdp.engine.unit import Phase, State, Unit, not_while_summoned


class Cycle:
    """The iteration that all units of one tree go through together.

    Args:
        units: all of them.
        reducer: combines their gradients.
        order_check, comparison: make sure that all ranks gather, and send, the same.
        backward_prefetch: when to ask for the next unit in backward; ``None`` for never ahead of time.
        forward_prefetch: whether to ask for the next unit in forward.

    Attributes:
        triggers: of each unit, what tells where its backward begins and ends.
        in_backward: a backward of this tree has begun and not ended.
        is_recorded: autograd was on when the outermost of the running forwards began.
        num_forwards: how many outermost forwards have begun.
        is_last_backward: the end of the next backward is the end of the iteration.
    """

    def __init__(
        self,
        units: list[Unit],
        reducer: Reducer,
        order_check: OrderCheck,
        comparison: Comparison,
        *,
        backward_prefetch: BackwardPrefetch | None,
        forward_prefetch: bool,
    ) -> None:
        self.units, self.reducer, self.order_check, self.comparison = units, reducer, order_check, comparison
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.schedule = Schedule()
        self.in_backward = self.is_recorded = False
        self.is_last_backward, self.num_forwards = True, 0
        self._lingering: Unit | None = None
        self._spans: dict[Unit, trace.Event] = {}
        # 2. Once for good.
        tells = (self.pre_backward, self.post_backward, self._close, reducer.make_room)
        self.triggers = {unit: trigger_for(unit, *tells) for unit in units}

    def dissolve(self) -> None:
        """The leaves tell this tree nothing any more: the units are about to join another one."""
        for unit in self.units:
            unit.layout.on_gradient(None)

    # --- forward ---

    def pre_forward(self, unit: Unit) -> None:
        """Called right before the unit's module runs; afterwards its parameters are there."""
        if unit.phase is Phase.PRE_BACKWARD:
            # 4. Recomputation: all is in place.
            return
        if self._lingering is not None:
            self._release_lingering(unit)
        unit.phase = Phase.FORWARD
        if unit.state is not State.UNSHARDED:
            unit.is_for_evaluation = not self.is_recorded
            if unit.state is State.SHARDED:
                self.order_check.check(unit)
                unit.unshard()
        if torch.is_grad_enabled():
            self.schedule.enter(unit)
            if self.forward_prefetch:
                next_one = self.schedule.next_forward(unit)
                if next_one is not None:
                    next_one.unshard()
        for ahead in unit.policy.ahead_in_forward or ():
            ahead.unshard()
        unit.wait()
        unit.layout.show_unsharded()
        if trace.recorder is not None:
            self._spans[unit] = trace.recorder.begin("F", unit.name)

    def post_forward(self, unit: Unit, inputs: Any, output: Any) -> None:
        """Called right after the unit's module has run."""
        if unit.phase is not Phase.PRE_BACKWARD:
            self.leave_forward(unit, is_recorded=self.watch_output(unit, inputs, output))

    def watch_output(self, unit: Unit, inputs: Any, output: Any) -> bool:
        """1. Lays trip wires on the output of a module; whether a backward through it is to be expected."""
        return torch.is_grad_enabled() and self.triggers[unit].watch_output(inputs, output)

    def leave_forward(self, unit: Unit, *, is_recorded: bool) -> None:
        """The forward of the unit is over, and all of its modules' outputs have been watched."""
        if trace.recorder is not None:
            trace.recorder.finish(self._spans.pop(unit, None))
        unit.phase = Phase.IDLE
        unit.ran_in = self.num_forwards
        if is_recorded:
            unit.awaits_backward = True
            if unit.counted_in != self.num_forwards:
                unit.counted_in, unit.num_pending = self.num_forwards, unit.num_pending + 1
            self.schedule.leave(unit)
            if graph_task() != NOT_IN_BACKWARD:
                # 5. The backward of what was just recomputed comes next.
                self._lingering = unit
                return
        if self._frees_after_forward(unit):
            unit.reshard(rests=unit.awaits_backward and self.is_recorded)
        else:
            unit.layout.show_resting(is_kept=not unit.policy.reshard_after_forward)

    def _frees_after_forward(self, unit: Unit) -> bool:
        if unit.policy.reshard_after_forward:
            # The root's backward follows its forward at once: freeing it would only mean to gather it again.
            return not (unit.policy.stays_for_backward and unit.awaits_backward and self.is_recorded)
        # A part without grad inside a recorded forward is no evaluation: it is checkpointed and will be computed again.
        return unit.policy.reshard_after_evaluation and unit.policy.reshard_after_backward and not self.is_recorded

    # --- backward ---

    def begin_backward(self) -> None:
        """The first event of this tree in a backward, whichever it is."""
        if not self.in_backward:
            self.in_backward = True
            self.comparison.begin_backward()
            # 3. Only possible from inside a backward.
            Variable._execution_engine.queue_callback(self.end_backward)

    def pre_backward(self, unit: Unit) -> None:
        """The trip wire. With several outputs, or several forwards, only the first one counts."""
        if unit.phase is Phase.PRE_BACKWARD:
            return
        if unit.phase is Phase.SUMMONED:
            raise not_while_summoned(unit, "backward")
        self.begin_backward()
        unit.phase = Phase.PRE_BACKWARD
        unit.graph_task = graph_task()
        if trace.recorder is not None:
            self._spans[unit] = trace.recorder.begin("B", unit.name)
        if self._lingering is not None:
            self._release_lingering(unit)
        unit.awaits_backward = False
        if unit.policy.gathers_in_backward and unit.state is State.SHARDED:
            unit.unshard()
        if unit.state is not State.SHARDED:
            unit.wait()
            unit.layout.show_again()
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            # Not earlier: what this unit has arrived in is given back by now.
            self._prefetch_backward(unit)

    def post_backward(self, unit: Unit) -> None:
        """The unit's gradient is complete, or, where that cannot be told, those of its inputs are."""
        self.begin_backward()
        gradient = unit.layout.take_gradient(with_unreduced=unit.policy.reduces)
        nested = graph_task() != unit.graph_task
        unit.phase = Phase.POST_BACKWARD
        if trace.recorder is not None:
            trace.recorder.finish(self._spans.pop(unit, None))
        if nested and unit.state is State.UNSHARDED:
            self._lingering = unit
        elif unit.policy.reshard_after_backward:
            unit.reshard()
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_backward(unit)
        if gradient is None:
            return
        if not unit.policy.reduces:
            unit.keep_gradient(gradient)
        elif len(unit.plans) == 1:
            self.reducer.reduce(unit.name, unit.layout, unit.plan, gradient)
        else:
            self._reduce_by_mesh(unit, gradient)

    def _reduce_by_mesh(self, unit: Unit, gradient: Gradient) -> None:
        for plan in unit.plans:
            part = unit.layout.part_over(plan.mesh, gradient)
            if part.parts:
                self.reducer.reduce(unit.name, unit.layout, plan, part)

    def _prefetch_backward(self, unit: Unit) -> None:
        if unit.policy.ahead_in_backward is not None:
            for ahead in unit.policy.ahead_in_backward:
                ahead.unshard()
            return
        next_one = self.schedule.next_backward(unit)
        if next_one is not None and next_one.awaits_backward and next_one.policy.gathers_in_backward:
            next_one.unshard()

    def _release_lingering(self, arriving: Unit) -> None:
        """5. Another unit's turn has come, so the lingering one's will not come next; unless it is inside of it."""
        lingering = self._lingering
        if lingering is None or lingering is arriving or arriving in lingering.inner:
            return
        self._lingering = None
        if (
            lingering.phase is not Phase.PRE_BACKWARD
            and lingering.policy.reshard_after_forward
            and not lingering.policy.stays_for_backward
        ):
            lingering.reshard()

    def _close(self, unit: Unit) -> None:
        """The unit has nothing more to do in this backward."""
        unit.phase = Phase.IDLE
        unit.awaits_backward = False
        if unit.policy.reshard_after_backward:
            unit.reshard()
        else:
            # Its memory is kept for the next iteration, but the gradients that the user may ask for are there now.
            unit.layout.show_resting(is_kept=False)

    def end_backward(self) -> None:
        """3. Autograd is done: afterwards every gradient is where the optimizer looks, and every unit is idle.

        A unit may still be gathered here because a prefetch asked for it in vain, or because autograd never reached
        its parameters. It is freed; the next forward must not meet parameters from before the optimizer step.
        """
        for unit in reversed(self.units):
            if unit.phase is not Phase.POST_BACKWARD and self.triggers[unit].is_overdue():
                self.post_backward(unit)
        if not self.is_last_backward:
            # Another backward of this iteration follows, and waits for these reductions and uses this order.
            self._end_of_partial_backward()
            return
        self.comparison.ask()
        self.reducer.finish()
        self.comparison.read()
        for unit in self.units:
            if unit.state is not State.SHARDED:
                self._close(unit)
        self.schedule.end_iteration()
        self._forget_backward()

    def _end_of_partial_backward(self) -> None:
        for unit in self.units:
            unit.num_pending = max(0, unit.num_pending - 1)
            unit.awaits_backward = unit.num_pending > 0
        self._leave_backward()

    def _forget_backward(self) -> None:
        for unit in self.units:
            unit.awaits_backward, unit.num_uses, unit.num_pending = False, 0, 0
        self._lingering = None
        self._leave_backward()

    def _leave_backward(self) -> None:
        for unit in self.units:
            # The user may look at one's full parameters while others compute.
            if unit.phase is not Phase.SUMMONED:
                unit.phase = Phase.IDLE
        self._spans.clear()
        self.in_backward = False

    def watch(self, output: Any) -> None:
        """For an outermost module without parameters of its own: notices the beginning of backward, nothing else."""
        if torch.is_grad_enabled():
            lay_wires(output, lambda _: self.begin_backward())

    # --- after an error ---

    def recover(self) -> None:
        """Brings every unit back to where an iteration may begin, after one that ended in an exception."""
        self.reducer.drop()
        for unit in self.units:
            unit.layout.take_gradient(with_unreduced=False)
            unit.reshard()
            unit.limiter.clear()
        self.schedule.abandon_iteration()
        self._forget_backward()
