"""The root state, which all units of a root module share, and the beginning of an iteration.

Units are created one by one, inner units first. So the constructor cannot decide whether a unit is the outermost unit.
The first forward decides: the unit whose forward runs first, outside of any other unit, is the *root*. A method such as
``unshard`` decides if it is called first. All units inside its module share its root state, which contains

* the communication streams: three streams for a hundred units instead of three hundred;
* the rate limiter: "two in flight" applies to all units together;
* the `IterationState`, with the recorded order and the one reduction in flight.

The beginning of an iteration does the following, in this order:

1. If the previous iteration ended in an exception (a unit is in forward or a backward never ended), reset every unit.
2. Raise an error if a unit has full parameters from ``summon_full_params``.
3. Make the all-gather stream wait for the compute stream, which has just run the optimizer.
4. Call the cases, which accept replaced parameters, for example. Reshard units whose shard has changed since the
   all-gather. An example is a step after an evaluation, which leaves the root unsharded. The layout cannot detect a
   change through ``.data``.

The end of the outermost forward does one more thing:

5. If no backward can follow, register the sharded parameters on the modules, even where memory is kept. An optimizer
   that is created now, or a change of the parameters, must affect the trainable parameters.

An iteration begins with an outermost forward and ends with its last backward.

If a unit runs a forward on its own first, it gets its own root state. If a larger root that contains the unit runs
later, the larger root's state replaces it.

*In torch:* ``_lazy_init`` and ``_root_pre_forward``. There, the last case fails an assertion about ``_is_root``.

Spec: CTOR-10, CTOR-11, SHARD-05, NEW-15, FRESH-01 to FRESH-05.
"""

from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any

import torch

from minifsdp.engine.backward_hooks import NOT_IN_BACKWARD, graph_task
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.events import events
from minifsdp.engine.extension_points import Case
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.messages import message
from minifsdp.engine.reduce import Reducer
from minifsdp.engine.schedule import BackwardPrefetch, Schedule
from minifsdp.engine.unit import Phase, State, Unit


def _earlier_streams(
    units: Sequence[tuple[str, Unit]], device: torch.device
) -> CommStreams | None:
    return next(
        (
            found
            for _, unit in units
            if unit.root is not None
            and (found := unit.root.comm_streams).device == device
        ),
        None,
    )


class RootState:
    """The state that the units of one root share.

    Args:
        units: all units of the root with their full names, including the unit of the outermost module, if there is one.
        outermost: the unit of the outermost module; ``None`` if the module has no parameters of its own.
        device: the compute device.
        cases: the cases that add code at the extension points.
        backward_prefetch: when backward prefetches the next unit; ``None`` disables prefetching.
        limit_all_gathers: whether the rate limiter is enabled.
        comm_streams: streams that are shared with other roots; ``None`` for those of an earlier root of the units, or
            new ones. The cache of an allocator belongs to a stream, so new streams would need new memory.

    Attributes:
        after_optimizer: an accelerator event, recorded after the optimizer step. The next all-gathers wait for it
            instead of all work on the compute stream. It is used once.
    """

    def __init__(
        self,
        units: Sequence[tuple[str, Unit]],
        outermost: Unit | None,
        device: torch.device,
        *,
        cases: Iterable[Case],
        backward_prefetch: BackwardPrefetch | None,
        limit_all_gathers: bool,
        comm_streams: CommStreams | None = None,
    ) -> None:
        self.device = device
        self._caller = outermost
        self.comm_streams = (
            comm_streams or _earlier_streams(units, device) or CommStreams(device)
        )
        self.limiter = RateLimiter(limit_all_gathers)
        self.units = [unit for _, unit in units]
        self.is_dissolved = False
        # The thread of the outermost forward that is running; 0 if none.
        self._thread = 0
        self.after_optimizer: Any = None
        for name, unit in units:
            unit.name = unit.layout.name = name
        by_module = {module: unit for unit in self.units for module in unit.modules}
        reducer = Reducer(
            self.comm_streams, offloads=any(unit.layout.offloads for unit in self.units)
        )
        schedule = Schedule(backward_prefetch)
        self.iteration = IterationState(self.units, reducer, schedule)
        for unit in self.units:
            unit.root = self
            inside = (
                by_module.get(inner)
                for module in unit.modules
                for inner in module.modules()
            )
            unit.inner = frozenset(
                other for other in inside if other is not None and other is not unit
            )
        for case in cases:
            case(self)
        self.iteration.observers = [observer(self.units) for observer in events.roots]

    def dissolve(self, *, keeps_unsharded: bool = False) -> None:
        """Releases the units. The next forward creates a new root state, possibly with a larger root or another dtype.

        Args:
            keeps_unsharded: whether idle units keep their state, for example if they were unsharded manually.
        """
        # A unit that the next root does not contain still needs its hook, if its backward follows.
        idle = [unit for unit in self.units if not unit.uses.awaits_backward]
        is_idle = all(unit.phase is Phase.IDLE for unit in self.units) and len(
            idle
        ) == len(self.units)
        if not keeps_unsharded or not is_idle or self.is_busy:
            self.iteration.recover()
        for unit in idle:
            unit.layout.on_gradient(None)
        self.is_dissolved = True

    def begin_forward(self, caller: Unit | None = None) -> bool:
        """Called when a forward of any unit begins.

        Args:
            caller: the unit; ``None`` for a module without one.

        Returns:
            Whether this is the outermost of the running calls. That call must call `end_forward` or `fail_forward`. It
            is usually the call of the outermost module, but an inner unit may be called on its own.
        """
        if caller is self._caller and self._thread not in (0, get_ident()):
            self.check_thread()
        if self.iteration.in_forward or graph_task() != NOT_IN_BACKWARD:
            # A forward inside another forward, or a recomputation during backward, does not begin an iteration.
            return False
        self._thread = get_ident()
        try:
            self._prepare(caller)
        except BaseException:
            self._thread = 0
            raise
        self.iteration.in_forward = True
        self._caller = caller
        self.iteration.num_forwards += 1
        return True

    def _prepare(self, caller: Unit | None) -> None:
        """Prepares all units for an iteration; see the docstring of the module."""
        # 1. An iteration that ended normally leaves no unit in forward and no backward open.
        if self.iteration.in_backward or Phase.FORWARD in [
            unit.phase for unit in self.units
        ]:
            self.iteration.recover()
        # 2. Check before the first collective, so that a mistake raises an error on every rank.
        for unit in self.units if caller is None else (caller, *caller.inner):
            if unit.phase is Phase.SUMMONED and not unit.layout.is_summoned:
                raise RuntimeError(
                    message("while-summoned", what="forward", unit=unit.name)
                )
        # 3. Code that writes to shards later in the iteration makes the stream wait again.
        self.comm_streams.all_gather.wait_compute(self.after_optimizer)
        self.after_optimizer = None
        self.iteration.is_recorded = torch.is_grad_enabled()
        for extend in self.iteration.points.forward_begins:
            extend()
        # 4. Parameters may have another dtype now, and a shard may have changed since its all-gather.
        for unit in self.units:
            if unit.layout.dtype is not unit.plans[0].computed_in:
                unit.plan_reductions()
            is_idle = unit.state is State.SHARDED or unit.phase is Phase.SUMMONED
            if not is_idle and unit.layout.is_stale():
                unit.reshard()
        for observer in self.iteration.observers:
            observer.forward_begins(self.units)

    def check_thread(self) -> None:
        """Called when a module is called while one of its calls is running.

        Raises:
            RuntimeError: if another thread is running the outermost forward.
        """
        if self._thread not in (0, get_ident()) and graph_task() == NOT_IN_BACKWARD:
            raise RuntimeError(message("two-threads"))

    def end_forward(self, output: Any) -> Any:
        """Called when the outermost call has returned. Returns the output to pass to the caller."""
        self.iteration.in_forward = False
        self._thread = 0
        for observer in self.iteration.observers:
            observer.left()
        for extend in self.iteration.points.forward_ends:
            output = extend(output)
        # If no backward follows, the optimizer may run next and write to a shard that an unused prefetch still reads.
        self.comm_streams.all_gather.join()
        units = self.units if self._caller is None else (self._caller,)
        if self.iteration.is_recorded and any(
            self.iteration.num_forwards in unit.uses.recorded for unit in units
        ):
            return output
        # 5. Memory is kept for later forwards, or for the backward of an earlier forward.
        for unit in self.units:
            if (
                unit.uses.ran_in == self.iteration.num_forwards
                and unit.state is not State.SHARDED
            ):
                unit.layout.use_sharded_params()
        if any(unit.layout.offloads for unit in self.units):
            # No backward will wait for the copies of the shards, and the user may write to the shards next.
            self.comm_streams.all_gather.synchronize()
        return output

    def fail_forward(self) -> None:
        """Called when the outermost call has raised an error. Reshards all units."""
        self.iteration.in_forward = False
        self._thread = 0
        self.iteration.recover()

    def recover_after_error(self) -> None:
        """Called when the user reads parameters or gradients. Cleans up after a backward that failed."""
        if self.iteration.in_backward and graph_task() == NOT_IN_BACKWARD:
            self.iteration.recover()

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward of this root is running."""
        return self.iteration.in_forward or self.iteration.in_backward
