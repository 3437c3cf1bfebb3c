"""The state of one ``fully_shard`` call, and its forward hooks.

``fully_shard`` adds no wrapper: the model keeps its modules, its names and its structure. Two hooks on the module,
before and after its own forward, replace the ``forward`` of a wrapper::

    before    begin an iteration if this is the outermost call; move and cast inputs; all-gather; register unsharded
              parameters; hook inputs
    after     cast the output; register pre-backward hooks on the output; reshard

Worked example: ``fully_shard(block0)``, ``fully_shard(block1)``, ``fully_shard(model)`` create three states. The first
``model(batch)`` runs the hook of the third state first, so this state becomes the root. It finds the other two states
in its submodules and creates one root state for all three.

Two situations that a wrapper does not have to handle:

1. An exception in forward skips the forward hook. ``FSDPModule.__call__`` catches it and calls `fail_calls`.
2. A module can call itself, for example in a recursive tree module, or in a ``generate`` method that calls
   ``self(token)``. The state keeps a list of its running calls. A call of a module in this list is an inner call.

*Extension point.* A case can be a subclass of `FSDPState` that overrides `begins_unit`, `leave`, `end_forward` and
`break_off`, see ``minifsdp/cases/module_lists.py``. ``fully_shard`` chooses the class.

*In torch:* ``FSDPState``, with the same two hooks. After an exception, users must call ``reset_iter_state``.

Spec: FS2-09, FS2-13, FS2-17, FS2-21, FS2-MP-04 to FS2-MP-06, NEW-04, NEW-15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minifsdp.cases.all_cases import CASES
from minifsdp.cases.containers import cast_floating, move
from minifsdp.cases.manual_finalization import manual_of
from minifsdp.cases.optimizer_steps import count_together
from minifsdp.cases.replaced_parameters import ReplacedParameters
from minifsdp.cases.smaller_mesh import SmallerMeshes
from minifsdp.cases.torch_attributes import TorchAttributes
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
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


def states_for(module: Any, recurse: bool) -> list[FSDPState]:
    """The state of a module of ``fully_shard``; with ``recurse``, also those of the modules inside it."""
    return (
        [state for _, state in states_in(module)]
        if recurse
        else [module._get_fsdp_state()]
    )


# The base class is a case, see ``minifsdp/cases``.
class FSDPState(TorchAttributes):
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
        # Libraries read `_mp_policy` and `_is_root`.
        self.modules = modules
        self.unit = unit
        self.device = device
        self._mp_policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.root_state: RootState | None = None
        # ``None`` until there is a root state.
        self._is_root: bool | None = None
        self.shared_comm_streams: CommStreams | None = None
        self._has_begun = False
        self.running: list[nn.Module] = []
        # States of cases with the same root state.
        self._cases: list[FSDPState] = []
        for module in modules:
            module.__dict__[ATTRIBUTE] = self
            module.register_forward_pre_hook(
                self.pre_forward, prepend=True, with_kwargs=True
            )
            module.register_forward_hook(
                self.post_forward, prepend=False, with_kwargs=True
            )

    # --- forward ---

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The forward pre-hook. Returns the inputs to pass to the module: arguments and keyword arguments."""
        root_state = self.current_root_state()
        is_inner = module in self.running
        if is_inner:
            # A second thread looks like an inner call.
            root_state.check_thread()
        self.running.append(module)
        if not is_inner and root_state.begin_forward(self.unit):
            self._has_begun = True
            if self.device.type != "cpu":
                args, kwargs = move(self.device, (args, kwargs))
        if (
            self._mp_policy.param_dtype is not None
            and self._mp_policy.cast_forward_inputs
        ):
            args, kwargs = cast_floating(self._mp_policy.param_dtype, (args, kwargs))
        # 2. An inner call uses the parameters that the outer call has all-gathered.
        if (
            is_inner
            or self.unit is None
            or not self.begins_unit(root_state.iteration, self.unit)
        ):
            return args, kwargs
        root_state.iteration.pre_forward(self.unit)
        return root_state.iteration.backward_hooks[self.unit].hook_inputs(
            (args, kwargs)
        )

    def post_forward(
        self, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """The forward hook. Returns the output to pass to the caller."""
        root_state: Any = self.root_state
        if self._mp_policy.output_dtype is not None:
            output = cast_floating(self._mp_policy.output_dtype, output)
        self.running.pop()
        if module in self.running:
            return output
        if self.unit is not None and self.unit.phase is not Phase.PRE_BACKWARD:
            output = self.leave(
                root_state.iteration, self.unit, {module}, (args, kwargs), output
            )
        elif self._has_begun:
            root_state.iteration.watch(output)
        if self._has_begun:
            for state in self._cases:
                output = state.end_forward(root_state.iteration, (args, kwargs), output)
            output = root_state.end_forward(output)
            self._has_begun = False
        return output

    # --- overridden by cases ---

    def begins_unit(self, iteration: IterationState, unit: Unit) -> bool:
        """Whether this call of a module begins the forward of the unit."""
        return True

    def leave(
        self,
        iteration: IterationState,
        unit: Unit,
        modules: set[nn.Module],
        inputs: Any,
        output: Any,
    ) -> Any:
        """Called when ``modules`` have finished. Ends the forward of the unit. Returns the output to use."""
        output, is_recorded = iteration.hook_output(unit, inputs, output)
        iteration.leave_forward(unit, is_recorded=is_recorded)
        return output

    def end_forward(self, iteration: IterationState, inputs: Any, output: Any) -> Any:
        """Called with the inputs and the output of the outermost call. Returns the output. Only called for cases."""
        return output

    # --- after an exception ---

    def fail_calls(self, num_running: int) -> None:
        """1. Called after an exception in a call of a module.

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
        if self.root_state is not None:
            self.root_state.fail_forward()

    # --- the root state ---

    def current_root_state(self) -> RootState:
        """The root state of this state. If there is none, creates a root state with this state as its root."""
        root_state = self.root_state
        return (
            self._create_root_state()
            if root_state is None or root_state.is_dissolved
            else root_state
        )

    def _create_root_state(self) -> RootState:
        found: dict[FSDPState, str] = {}
        for module in self.modules:
            for name, state in states_in(module):
                found.setdefault(state, "" if state is self else name)
        for state in found:
            if state.root_state is not None and not state.root_state.is_dissolved:
                if manual_of(state.root_state.iteration) is not None:
                    raise RuntimeError(
                        message(
                            "fsdp-root-only", call="set_manual_backward_finalization"
                        )
                    )
                # Units that the user unsharded manually stay unsharded.
                state.root_state.dissolve(keeps_unsharded=True)
            if state.unit is not None and state.reshard_after_forward is None:
                # The root's backward directly follows its forward.
                state.unit.update_policy(reshard_after_forward=state is not self)
        root_state = RootState(
            [
                (name, state.unit)
                for state, name in found.items()
                if state.unit is not None
            ],
            self.unit,
            self.device,
            cases=(count_together, ReplacedParameters, *CASES, SmallerMeshes),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            limit_all_gathers=False,
            comm_streams=self.shared_comm_streams,
        )
        cases = [state for state in found if type(state) is not FSDPState]
        for state in found:
            state.root_state = root_state
            state._cases = cases
            state._is_root = state is self
        return root_state
