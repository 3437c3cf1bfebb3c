"""The state of one ``fully_shard`` call, and its forward hooks.

``fully_shard`` adds no wrapper: the model keeps its modules, its names and its structure. Two hooks on the module,
before and after its own forward, replace the ``forward`` of a wrapper::

    before    begin an iteration if none is open; cast inputs; all-gather; register unsharded parameters; hook inputs
    after     cast the output; reshard; register pre-backward hooks on the output

Worked example: ``fully_shard(block0)``, ``fully_shard(block1)``, ``fully_shard(model)`` create three states. The first
``model(batch)`` runs the hook of the third state first, so this state becomes the root. It finds the other two states
in its submodules and creates one root state for all three.

Three cases that a wrapper does not have to handle:

1. Several modules can share one unit. It is all-gathered before the first of them runs and resharded after the last.
2. An exception in forward skips the forward hook. ``FSDPModule.__call__`` catches it and calls `fail_calls`.
3. A module can call itself, for example in a recursive tree module, or in a ``generate`` method that calls
   ``self(token)``. The state keeps a list of its running calls. A call of a module in this list is an inner call.

*In torch:* ``FSDPState``, with the same two hooks. After an exception, users must call ``reset_iter_state``.

Spec: FS2-09, FS2-13, FS2-17, FS2-21, FS2-MP-04 to FS2-MP-06, NEW-04, NEW-15.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from minifsdp.compat.composable import ParamGroup
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.precision import cast_floating, move
from minifsdp.engine.requested import with_newest_node
from minifsdp.engine.root import RootState
from minifsdp.engine.schedule import BackwardPrefetch
from minifsdp.engine.unit import Phase, Unit
from minifsdp.fsdp2.options import MixedPrecisionPolicy

ATTRIBUTE = "_fully_sharded"


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of ``module``; ``None`` if ``fully_shard`` was not called on it."""
    state: FSDPState | None = module.__dict__.get(ATTRIBUTE)
    return state


def states_in(module: nn.Module) -> list[tuple[str, FSDPState]]:
    """All states of ``module`` and its submodules, with the names of their modules. Each state appears once."""
    names: dict[FSDPState, list[str]] = {}
    for name, inner in module.named_modules():
        if (state := state_of(inner)) is not None:
            names.setdefault(state, []).append(name)
    return [(", ".join(found), state) for state, found in names.items()]


class FSDPState:
    """The state of one ``fully_shard`` call.

    Args:
        modules: the module or modules that ``fully_shard`` was called on.
        unit: the unit of their parameters; ``None`` if inner units manage all of them.
        device: the compute device.
        policy: the mixed-precision policy.
        reshard_after_forward: the user's choice; ``None`` means ``True`` for all units except the root.

    Attributes:
        running: the modules whose calls are running, the outermost first. A module that calls itself appears twice.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        unit: Unit[PerParameterLayout] | None,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        # Libraries read `_mp_policy` and the attributes at the end of this class, see ``compat/composable.py``.
        self.modules, self.unit, self.device, self._mp_policy = modules, unit, device, policy
        self.reshard_after_forward = reshard_after_forward
        self.root_state: RootState | None = None
        # Libraries read this attribute. It is ``None`` before the first forward.
        self._is_root: bool | None = None
        self.shared_comm_streams: CommStreams | None = None
        self._has_begun = False
        # 1. Modules of this state that have not run yet in the current forward, and the number of that forward.
        self._waiting: set[nn.Module] = set()
        self._waits_in = 0
        self.running: list[nn.Module] = []
        self._is_recorded = False
        # States with the same root state that have several modules.
        self._grouped: list[FSDPState] = []
        for module in modules:
            module.__dict__[ATTRIBUTE] = self
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, prepend=False, with_kwargs=True)

    # --- forward ---

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The forward pre-hook. Returns the inputs to pass to the module: arguments and keyword arguments."""
        root_state = self.current_root_state()
        is_inner = module in self.running
        if is_inner:
            root_state.check_thread()
        self.running.append(module)
        if not is_inner and root_state.begin_forward(self.unit):
            self._has_begun = True
            if self.device.type != "cpu":
                args, kwargs = move(self.device, (args, kwargs))
        if self._mp_policy.param_dtype is not None and self._mp_policy.cast_forward_inputs:
            args, kwargs = cast_floating(self._mp_policy.param_dtype, (args, kwargs))
        # 3. An inner call uses the parameters that the outer call has all-gathered.
        if is_inner or self.unit is None or self._is_between(root_state, self.unit):
            return args, kwargs
        root_state.iteration.pre_forward(self.unit)
        return root_state.iteration.backward_hooks[self.unit].watch_inputs((args, kwargs))

    def _is_between(self, root_state: RootState, unit: Unit) -> bool:
        """1. Whether another module of this state has already run, and all-gathered the unit, in this forward."""
        if len(self.modules) == 1 or unit.phase is Phase.PRE_BACKWARD:
            return False
        if self._waiting and self._waits_in == root_state.iteration.num_forwards:
            return True
        # The latest forward may have failed between the modules.
        self._waiting, self._waits_in, self._is_recorded = set(self.modules), root_state.iteration.num_forwards, False
        return False

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The forward hook. Returns the output to pass to the caller."""
        root_state = self.root_state
        assert root_state is not None
        if self._mp_policy.output_dtype is not None:
            output = cast_floating(self._mp_policy.output_dtype, output)
        self.running.pop()
        if module in self.running:
            return output
        if self.unit is not None and self.unit.phase is not Phase.PRE_BACKWARD:
            if self.unit.policy.reshard_after_forward:
                output = with_newest_node(output)
            # 1. Hook each module's output, because any of the modules can be the last to run.
            self._leave(root_state, self.unit, {module}, (args, kwargs), output)
        elif self._has_begun:
            root_state.iteration.watch(output)
        if self._has_begun:
            self._has_begun = False
            for state in self._grouped:
                if state.unit is not None and state._waiting and state._waits_in == root_state.iteration.num_forwards:
                    # Some modules of this state were not called in this forward. The model may use their parameters
                    # anyway, and backward may reach them before it reaches an output of the other modules.
                    state._leave(root_state, state.unit, state._waiting, (args, kwargs), output)
            output = root_state.end_forward(output)
        return output

    def _leave(self, root_state: RootState, unit: Unit, modules: set[nn.Module], inputs: Any, output: Any) -> None:
        """Called when ``modules`` have finished. If no others are left, ends the forward of the unit."""
        self._is_recorded |= root_state.iteration.watch_output(unit, inputs, output)
        self._waiting -= modules
        if not self._waiting:
            is_recorded, self._is_recorded = self._is_recorded, False
            root_state.iteration.leave_forward(unit, is_recorded=is_recorded)

    def fail_calls(self, num_running: int) -> None:
        """2. Called after an exception in a call of a module.

        Args:
            num_running: the number of running calls before this call. The calls after them have ended.
        """
        del self.running[num_running:]
        if self._has_begun and not self.running:
            # Without this reset, a later call of an inner module would count as a part of this forward.
            self.break_off()

    def break_off(self) -> None:
        """Resets the root state after an exception, so that a new iteration can begin."""
        self._has_begun = False
        self._waiting.clear()
        if self.root_state is not None:
            self.root_state.fail_forward()

    # --- the root state ---

    def current_root_state(self) -> RootState:
        """The root state of this state. If there is none, creates a root state with this state as its root."""
        root_state = self.root_state
        return self._create_root_state() if root_state is None or root_state.is_dissolved else root_state

    def _create_root_state(self) -> RootState:
        found: dict[FSDPState, str] = {}
        for module in self.modules:
            for name, state in states_in(module):
                found.setdefault(state, "" if state is self else name)
        for state in found:
            if state.root_state is not None and not state.root_state.is_dissolved:
                if state.root_state.iteration.is_manual:
                    raise RuntimeError(message("fsdp-root-only", call="set_manual_backward_finalization"))
                # Units that the user unsharded manually stay unsharded.
                state.root_state.dissolve(keeps_unsharded=True)
            if state.unit is not None and state.reshard_after_forward is None:
                # The root's backward directly follows its forward.
                state.unit.update_policy(reshard_after_forward=state is not self)
        root_state = RootState(
            [(name, state.unit) for state, name in found.items() if state.unit is not None],
            self.unit,
            self.device,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=False,
            limit_all_gathers=False,
            comm_streams=self.shared_comm_streams,
        )
        grouped = [state for state in found if len(state.modules) > 1]
        for state in found:
            state.root_state, state._grouped = root_state, grouped
            state._is_root = state is self
        return root_state

    # --- attributes that libraries read ---

    # The pipeline schedules of torch before 2.15 call a method of each of these states, and
    # `_root_post_backward_final_callback` after it, which is enough.
    _state_ctx = SimpleNamespace(all_states=())

    def _root_post_backward_final_callback(self) -> None:
        """Reduces all gradients after the last micro-batch, if a pipeline schedule has split each backward.

        The gradients of the weights are then computed by ``autograd.grad``, which calls no hooks of the unit.
        """
        iteration = self.current_root_state().iteration
        iteration.begin_finish()
        iteration.finish()

    @property
    def _comm_ctx(self) -> object:
        """The same object for states that share communication streams."""
        return self.shared_comm_streams or self

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return [] if self.unit is None else [ParamGroup(self.unit, self._mp_policy, self.reshard_after_forward)]

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)
