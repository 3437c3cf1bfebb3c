"""The tree: a lazy root, what its units share, and the beginning of an iteration.

Units are made one by one, inner ones first, and none of them can know at that time whether it will be the outermost.
So the question is left open until the first forward: the unit whose forward runs first, with no other around it, is the
*root*, and all units inside its module belong to its tree. A tree shares

* the lanes: three streams for a hundred units, not three hundred;
* the rate limiter: "two in flight" is a statement about all units together;
* the cycle, with the recorded order and the one reduction in flight.

What is done at the beginning of an iteration, in this order:

1. if the iteration before ended in an exception, which shows in a unit that is still in forward or a backward that
   never ended, bring every unit back to a defined state;
2. take over, or refuse, what users have put in the place of parameters;
3. let the gather lane follow the compute stream, which has just run the optimizer;
4. free the parameters that are still unsharded if their shard has changed since the all-gather. This happens to the
   root after a recorded forward without a backward. Parameters that an evaluation has gathered and kept are freed
   before a recorded forward in any case: a change through ``.data`` leaves no trace.
5. at the end, if no backward can follow, the modules show sharded parameters again, also where memory is kept. An
   optimizer that is made now, or a change of the parameters, must see the parameters that are trained.

A unit that ran forward on its own first was the root of its own small tree. When it turns out later that there is a
larger one around it, the larger tree takes it over.

*In torch:* ``_lazy_init`` and ``_root_pre_forward``; being taken over ends there in an assertion about ``_is_root``.

Spec: CTOR-10, CTOR-11, SHARD-05, NEW-15, FRESH-01 to FRESH-05.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minifsdp.engine import misuse
from minifsdp.engine.comparison import Comparison
from minifsdp.engine.hooks import Cycle
from minifsdp.engine.lanes import Lanes
from minifsdp.engine.layout import Steps
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.order_check import OrderCheck
from minifsdp.engine.reduce import Reducer
from minifsdp.engine.schedule import BackwardPrefetch
from minifsdp.engine.triggers import NOT_IN_BACKWARD, graph_task
from minifsdp.engine.unit import Phase, State, Unit, not_while_summoned


class Root:
    """What the units of one tree share.

    Args:
        units: all units of the tree with their full names, the outermost module's own unit (if it has one) included.
        outermost: the unit of the outermost module; ``None`` if that has no parameters of its own.
        device: the compute device.
        backward_prefetch: when backward asks for the next unit; ``None`` for never ahead of time.
        forward_prefetch: whether forward does.
        limit_gathers: whether the rate limiter is on.
        keeps_outermost: whether ``outermost`` stays for its backward whatever its strategy says.
        lanes: to be shared with other trees; ``None`` for lanes of its own.

    Attributes:
        after_optimizer: an accelerator's event, recorded after the optimizer step, for the next gathers to wait for
            instead of for all that the compute stream has been given; used once.
    """

    def __init__(
        self,
        units: Sequence[tuple[str, Unit]],
        outermost: Unit | None,
        device: torch.device,
        *,
        backward_prefetch: BackwardPrefetch | None,
        forward_prefetch: bool,
        limit_gathers: bool,
        keeps_outermost: bool = True,
        lanes: Lanes | None = None,
    ) -> None:
        self.device, self.outermost = device, outermost
        self.lanes = lanes or Lanes(device)
        self.limiter = RateLimiter(limit_gathers)
        self.units = [unit for _, unit in units]
        self._forward_is_open = self.is_dissolved = False
        self.after_optimizer: Any = None
        for name, unit in units:
            unit.name = unit.layout.name = name
            unit.choose(stays_for_backward=unit is outermost and keeps_outermost)
            if unit.phase is not Phase.SUMMONED:
                unit.layout.settle()
            if unit.precision.reduce is None:
                # The model may have been converted since.
                for plan in unit.plans:
                    plan.use(unit.layout.dtype)
            unit.join(self.lanes, self.limiter)
        self.cycle = Cycle(
            self.units,
            Reducer(self.lanes, offloads=any(unit.layout.offloads for unit in self.units)),
            OrderCheck(self.units, device),
            Comparison(self.units, self.lanes),
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
        )
        self._connect_units()

    def _connect_units(self) -> None:
        by_module = {unit.module: unit for unit in self.units}
        # The steps that were counted before the units became one tree stay counted.
        steps = max((unit.layout.steps for unit in self.units), key=lambda steps: steps.count, default=Steps())
        for unit in self.units:
            unit.layout.steps = steps
            inside = (by_module.get(module) for module in unit.module.modules())
            unit.inner = frozenset(other for other in inside if other is not None and other is not unit)

    def dissolve(self, *, keeps_gathered: bool = False) -> None:
        """Lets the units go; the next forward finds them again, perhaps in a larger tree or in another dtype.

        Args:
            keeps_gathered: units that are idle stay as they are, for instance gathered by hand.
        """
        is_idle = all(unit.phase is Phase.IDLE and not unit.awaits_backward for unit in self.units)
        if not keeps_gathered or not is_idle or self.is_busy:
            self.cycle.recover()
        self.cycle.dissolve()
        self.is_dissolved = True

    def begin_forward(self, caller: Unit | None = None) -> bool:
        """Called when a forward of any unit begins.

        Args:
            caller: the unit; ``None`` for an outermost module without one.

        Returns:
            Whether this is the outermost of the calls, the one that must call `end_forward`, or `fail_forward`.
            That is usually the outermost module's, but an inner unit may be called on its own.
        """
        if self._forward_is_open or graph_task() != NOT_IN_BACKWARD:
            # Inside another forward, or a recomputation inside backward: no new iteration.
            return False
        # 1. An iteration that came to its end leaves no unit in forward and no backward open.
        if self.cycle.in_backward or Phase.FORWARD in [unit.phase for unit in self.units]:
            self.cycle.recover()
        # 2. Before the first collective, so that a mistake ends in a message on every rank.
        for unit in self.units if caller is None else (caller, *caller.inner):
            if unit.phase is Phase.SUMMONED:
                raise not_while_summoned(unit, "forward")
        misuse.check_not_in_ddp((unit.layout.local_parameters(), unit.plan.mesh) for unit in self.units)
        for unit in self.units:
            if unit.phase is not Phase.SUMMONED:
                unit.layout.notice_edits()
        # 3. Once in an iteration is enough: nothing else writes to shards while it runs.
        self.lanes.gather.follow(self.after_optimizer)
        self.after_optimizer = None
        self.cycle.comparison.begin_forward()
        # 4. Changed since it was gathered.
        is_recorded = self.cycle.is_recorded = torch.is_grad_enabled()
        for unit in self.units:
            if (unit.state is not State.SHARDED or unit.policy.resting is not None) and (
                (unit.is_for_evaluation and (is_recorded or unit.policy.reshard_after_evaluation))
                or unit.layout.is_stale()
            ):
                unit.reshard()
        self._forward_is_open, self._caller = True, caller
        self.cycle.num_forwards += 1
        return True

    def end_forward(self) -> None:
        """Called when the outermost of the calls has returned."""
        self._forward_is_open = False
        # If no backward follows, the optimizer may be next, and write to a shard that a vain prefetch still reads.
        self.lanes.gather.join()
        units = self.units if self._caller is None else (self._caller,)
        if self.cycle.is_recorded and any(unit.counted_in == self.cycle.num_forwards for unit in units):
            return
        # 5. What is kept in memory is for later evaluations, or for the backward of an earlier forward.
        for unit in self.units:
            if unit.ran_in == self.cycle.num_forwards and unit.state is not State.SHARDED:
                unit.layout.show_sharded()
                # With grad mode, autograd may need the memory for a loss that is not in the output. No forward does.
                unit.is_for_evaluation |= self.cycle.is_recorded and not unit.awaits_backward
        if any(unit.layout.offloads for unit in self.units):
            # No backward will wait for the copies of the shards, and the user may write to them next.
            self.lanes.gather.synchronize()

    def fail_forward(self) -> None:
        """Called when the outermost of the calls has raised: the units are as if it had never begun."""
        self._forward_is_open = False
        self.cycle.recover()

    def mend(self) -> None:
        """Called when the user looks at parameters or gradients: if a backward was broken off, tidies up after it."""
        if self.cycle.in_backward and graph_task() == NOT_IN_BACKWARD:
            self.cycle.recover()

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward of the tree is going on."""
        return self._forward_is_open or self.cycle.in_backward
