"""The forward and backward hooks of a unit, and the end of backward.

::

    pre_forward      all-gather, wait, register the unsharded parameters, prefetch units that the user lists
      (the module)
    post_forward     register the pre-backward hook on the output, and reshard
    pre_backward     after the gradient of the output is computed: all-gather, wait, register, prefetch
      (autograd)
    post_backward    after the gradients of all parameters, or of the inputs: reshard, prefetch, reduce
    end_backward     after autograd is done: complete the last reduction, clean up

How the backward hooks are called:

1. *Pre-backward* is a hook on the output tensors of forward. Each forward has new output tensors, so each forward
   registers the hook.
2. *Post-backward* is called by a hook on the leaf of a flat layout, or on views of the unit's inputs
   (``backward_hooks.py``).
3. *End of backward* is a callback that autograd runs after its last node. It can only be queued during a backward, so
   the first hook of a backward queues it. It also handles units whose post-backward hook did not run.

Activation checkpointing runs a unit's forward *again during backward*. The engine detects this because autograd is
running. Two rules change:

4. A forward in the phase PRE_BACKWARD does nothing: the unit is unsharded, and its backward waits for the result.
5. A forward in another phase all-gathers as usual but does not reshard, because the unit's own backward runs next. The
   reshard is *deferred* until then. If another unit runs instead, the unit is resharded. A reshard is also deferred if
   a gradient is complete inside a nested backward (reentrant checkpointing of a part of the unit), because another part
   may still need the same parameters for its recomputation.

A backward with ``create_graph=True`` also changes a rule:

6. The graph that a backward with ``create_graph=True`` records refers to the parameters, and no hook of a module's
   output precedes its nodes. So the units in it stay unsharded until the end of the backward that computes the
   gradients of their parameters, or until the parameters change.

Rare cases add code at the points of ``extension_points.py``, for example a unit that returns its parameters.

*In torch:* ``_runtime_utils.py``, 1654 lines. With reentrant checkpointing (note 5) it uses 3 all-gathers instead of 2.

Spec: SHARD-04, SHARD-08, SHARD-10, SHARD-14, FWD-06, PREF-02 to PREF-06, NOSYNC-01, NOSYNC-07, PAR-07.
"""

from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from minifsdp.engine import backward_hooks
from minifsdp.engine.backward_hooks import (
    NOT_IN_BACKWARD,
    graph_task,
    register_pre_backward_hook,
)
from minifsdp.engine.events import events
from minifsdp.engine.extension_points import ExtensionPoints
from minifsdp.engine.messages import message
from minifsdp.engine.reduce import Reducer
from minifsdp.engine.schedule import BackwardPrefetch, Schedule
from minifsdp.engine.unit import Phase, State, Unit


class IterationState:
    """The runtime of one root: the state of an iteration that all its units share.

    Args:
        units: all units of the root.
        reducer: reduces their gradients.
        schedule: the order of the units, and when to prefetch.

    Attributes:
        observers: the observers of this root; set by the root state.
        points: the points at which cases run code of their own.
        backward_hooks: for each unit, the object that calls its backward hooks.
        in_forward: whether a forward of this root is running.
        in_backward: whether a backward of this root has begun and not ended.
        is_recorded: whether grad mode was on when the outermost of the running forwards began.
        num_forwards: number of outermost forwards that have begun.
        is_last_backward: whether the end of the next backward is the end of the iteration.
        is_open: whether a backward has ended and its iteration has not.
    """

    def __init__(
        self,
        units: list[Unit],
        reducer: Reducer,
        schedule: Schedule,
    ) -> None:
        self.units = units
        self.reducer = reducer
        self.observers: list[Any] = []
        self.schedule = schedule
        self.points = ExtensionPoints()
        self.in_forward = self.in_backward = self.is_recorded = False
        self.is_last_backward = True
        self.num_forwards = 0
        self.is_open = False
        self._deferred: Unit | None = None
        # 2. Created once, not in each forward. The kind depends on the layout.
        self.backward_hooks: dict[Unit, backward_hooks.LeafHooks] = {}
        for unit in units:
            has_leaf_hook = unit.layout.on_gradient(
                partial(self.post_backward, unit), reducer.before_concat
            )
            kind = (
                backward_hooks.LeafHooks
                if has_leaf_hook
                else backward_hooks.InputsHooks
            )
            self.backward_hooks[unit] = kind(
                unit, self.pre_backward, self.post_backward, self._finish_backward
            )

    # --- forward ---

    def pre_forward(self, unit: Unit) -> None:
        """Called directly before the unit's module runs. Afterwards the unit's parameters are unsharded."""
        if unit.phase in (Phase.PRE_BACKWARD, Phase.SUMMONED):
            # 4. Recomputation, or full parameters of the user: the parameters are already unsharded.
            return
        if self._deferred is not None:
            self._run_deferred_reshard(self._deferred, unit)
        unit.phase = Phase.FORWARD
        if unit.state is State.SHARDED:
            unit.unshard()
        unit.wait()
        unit.layout.use_unsharded_params()
        # Prefetch only now, because the all-gather buffer of this unit has been freed.
        for ahead in unit.policy.prefetch_in_forward or ():
            ahead.unshard()
        if events.recorder is not None:
            events.recorder.begin("F", unit.name)

    def hook_output(self, unit: Unit, inputs: Any, output: Any) -> tuple[Any, bool]:
        """1. Registers the pre-backward hook on the output of a module.

        Returns:
            The output to pass to the caller, and whether a backward can follow.
        """
        for extend in self.points.unit_output:
            output = extend(unit, output)
        return output, torch.is_grad_enabled() and self.backward_hooks[
            unit
        ].hook_output(inputs, output)

    def leave_forward(self, unit: Unit, *, is_recorded: bool) -> None:
        """Ends the forward of the unit. Call `hook_output` for the outputs of all its modules first."""
        if events.recorder is not None:
            events.recorder.end("F", unit.name)
        unit.phase = Phase.IDLE
        unit.uses.ran_in = self.num_forwards
        if is_recorded:
            unit.uses.awaits_backward = True
            unit.uses.recorded.add(self.num_forwards)
            self.schedule.leave(unit)
            if graph_task() != NOT_IN_BACKWARD:
                # 5. The backward of the recomputed part runs next.
                self._deferred = unit
                return
        if unit.policy.reshard_after_forward and not unit.is_held:
            unit.reshard()
        else:
            unit.layout.use_kept_params(is_kept=True)

    # --- backward ---

    def begin_backward(self) -> None:
        """Called by the first hook of this root that runs in a backward."""
        if not self.in_backward:
            self.in_backward = True
            for extend in self.points.backward_begins:
                extend()
            for observer in self.observers:
                observer.backward_begins(graph_task())
            # 3. Only possible during a backward.
            Variable._execution_engine.queue_callback(self.end_backward)

    def pre_backward(self, unit: Unit) -> None:
        """The pre-backward hook. Until the post-backward hook has run, further calls have no effect."""
        if unit.phase is Phase.PRE_BACKWARD:
            return
        if unit.phase is Phase.SUMMONED:
            raise RuntimeError(
                message("while-summoned", what="backward", unit=unit.name)
            )
        if not self.in_backward:
            self.begin_backward()
        for extend in self.points.unit_backward:
            extend(unit)
        unit.phase = Phase.PRE_BACKWARD
        unit.uses.graph_task = graph_task()
        if events.recorder is not None:
            events.recorder.begin("B", unit.name)
        if self._deferred is not None:
            self._run_deferred_reshard(self._deferred, unit)
        unit.uses.awaits_backward = False
        # 6. Autograd turns on grad mode only with `create_graph=True`.
        unit.is_held |= torch.is_grad_enabled()
        if unit.policy.unshards_in_backward and unit.state is State.SHARDED:
            unit.unshard()
        if unit.state is not State.SHARDED:
            unit.wait()
            unit.layout.use_unsharded_params(is_backward=True)
        if self.schedule.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            # Prefetch only now, because the all-gather buffer of this unit has been freed.
            self._prefetch_backward(unit)

    def post_backward(self, unit: Unit) -> None:
        """Called when the gradients of the unit, or, if the layout cannot detect this, of its inputs are complete."""
        if not self.in_backward:
            self.begin_backward()
        gradient = unit.layout.take_gradient(with_unreduced=unit.policy.reduces)
        nested = graph_task() != unit.uses.graph_task
        unit.phase = Phase.POST_BACKWARD
        if events.recorder is not None:
            events.recorder.end("B", unit.name)
        if nested and unit.state is State.UNSHARDED:
            self._deferred = unit
        elif unit.policy.reshard_after_backward and not unit.is_held:
            unit.reshard()
        if self.schedule.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_backward(unit)
        if gradient is None:
            return
        if unit.is_held:
            for extend in self.points.held_gradient:
                extend(unit, gradient)
            unit.is_held = torch.is_grad_enabled()
        if not unit.policy.reduces:
            unit.layout.keep_unreduced(gradient)
            for observer in events.optimizers:
                observer.unreduced(unit.layout)
            return
        # One plan for each mesh. Nearly always there is one.
        for plan in unit.plans:
            part = gradient if plan.indices is None else gradient.only(plan.indices)
            if part.parts:
                self.reducer.reduce(unit.layout, plan, part)

    def _prefetch_backward(self, unit: Unit) -> None:
        if unit.policy.prefetch_in_backward is not None:
            for ahead in unit.policy.prefetch_in_backward:
                ahead.unshard()
            return
        next_one = self.schedule.next_backward(unit)
        if (
            next_one is not None
            and next_one.uses.awaits_backward
            and next_one.policy.unshards_in_backward
        ):
            next_one.unshard()

    def _run_deferred_reshard(self, deferred: Unit, arriving: Unit) -> None:
        """5. Reshards the unit ``deferred`` now, unless the next unit to run is the same unit or inside it."""
        if deferred is arriving or arriving in deferred.inner:
            return
        self._deferred = None
        is_freed = deferred.policy.reshard_after_forward and not deferred.is_held
        if is_freed and deferred.phase is not Phase.PRE_BACKWARD:
            deferred.reshard()

    def _finish_backward(self, unit: Unit) -> None:
        """Ends this backward for the unit."""
        unit.phase = Phase.IDLE
        unit.uses.awaits_backward = False
        if unit.policy.reshard_after_backward and not unit.is_held:
            unit.reshard()
        else:
            # The memory is kept for the next iteration. A flat layout registers parameters that have gradients.
            unit.layout.use_kept_params(is_kept=False)

    def end_backward(self) -> None:
        """3. Called when autograd is done. Ends the iteration, unless another backward or a case does so later."""
        self.reduce_overdue()
        # A case may end this backward in another way.
        if not any(extend() for extend in self.points.backward_ends):
            if self.is_last_backward:
                self.end_iteration()
            else:
                self.keep_open()
        self.leave_backward()

    def end_iteration(self) -> None:
        """Completes the reductions and reshards the units.

        A unit may still be unsharded here because of an unused prefetch, or because autograd did not reach its
        parameters. Such a unit is resharded, unless its policy keeps it.
        """
        for observer in self.observers if self.units else ():
            observer.backward_ends(self)
        self.reducer.finish()
        for observer in self.observers:
            observer.reduced()
        for unit in self.units:
            if unit.state is not State.SHARDED and unit.phase is not Phase.SUMMONED:
                self._finish_backward(unit)
        self.schedule.end_iteration()
        self._forget_backward()

    def keep_open(self) -> None:
        """This iteration has another backward, which waits for these reductions and uses the recorded order."""
        self.reducer.finish_on_cpu()
        self.is_open = True
        for unit in self.units:
            recorded = unit.uses.recorded
            recorded.discard(min(recorded, default=0))
            unit.uses.awaits_backward = bool(recorded)

    def reduce_overdue(self) -> None:
        """Calls the post-backward hook of the units whose hook has not run."""
        for unit in reversed(self.units):
            if (
                unit.phase not in (Phase.POST_BACKWARD, Phase.FORWARD)
                and self.backward_hooks[unit].is_overdue()
            ):
                self.post_backward(unit)

    def _forget_backward(self) -> None:
        for unit in self.units:
            unit.uses.awaits_backward = False
            unit.uses.recorded.clear()
            self.backward_hooks[unit].num_recorded = 0
        self._deferred = None
        self.is_open = False

    def leave_backward(self) -> None:
        """Called at the end of each backward. Every unit is idle afterwards, except those in a forward."""
        for unit in self.units:
            # The user may summon the parameters of one unit while other units compute.
            if unit.phase not in (Phase.SUMMONED, Phase.FORWARD):
                unit.phase = Phase.IDLE
        self.in_backward = False
        for observer in self.observers:
            observer.left()

    def watch(self, output: Any) -> None:
        """Detects the beginning of backward for an outermost module without its own parameters."""
        if torch.is_grad_enabled():
            register_pre_backward_hook(output, lambda _: self.begin_backward())

    # --- after an error ---

    def recover(self) -> None:
        """Resets every unit after an iteration that ended in an exception, so that a new iteration can begin."""
        self.reducer.drop()
        for unit in self.units:
            if unit.phase is Phase.FORWARD:
                unit.phase = Phase.IDLE
            unit.layout.take_gradient(with_unreduced=False)
            unit.reshard()
            unit.root.limiter.clear()
        self.schedule.end_iteration()
        self._forget_backward()
        self.leave_backward()
