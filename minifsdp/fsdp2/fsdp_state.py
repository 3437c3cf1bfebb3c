"""What one call of ``fully_shard`` has made, and how it takes part in the forward of a module that nothing wraps.

There is no wrapper here: the model keeps its modules, its names and its structure. So what a wrapper's ``forward``
would do is done by two hooks on the module, one before and one after its own forward::

    before    begin an iteration if none is open; cast the inputs; gather; show the full parameters; watch the inputs
    after     cast the output; free; lay trip wires on the output

Worked example: ``fully_shard(block0)``, ``fully_shard(block1)``, ``fully_shard(model)`` make three states. The first
``model(batch)`` meets the third one's hook first, so that is the root; it finds the two others among its modules and
makes them one tree.

Three things that a wrapper would not have to care about:

1. several modules may share one unit. Its gather belongs before the first of them and its end behind the last.
2. after an exception in forward no hook runs. That an iteration was broken off is noticed when the same module begins
   a forward again without having ended one.
3. a module may call itself: a tree that descends into its own branches, a ``generate`` that calls ``self(token)``. That
   begins twice as well, but there the first call is still to be found on the stack.

*In torch:* ``FSDPState``, with the same two hooks.

Spec: FS2-09, FS2-13, FS2-17, FS2-21, FS2-MP-04 to FS2-MP-06, NEW-04, NEW-15.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from minifsdp.engine.lanes import Lanes
from minifsdp.engine.precision import cast_floating, move
from minifsdp.engine.root import Root
from minifsdp.engine.schedule import BackwardPrefetch
from minifsdp.engine.unit import Phase, Unit
from minifsdp.fsdp2.options import MixedPrecisionPolicy

ATTRIBUTE = "_fully_sharded"
# The function around a method that is registered as another forward.
CALLER = "call_as_forward"


def state_of(module: nn.Module) -> FSDPState | None:
    """What ``fully_shard`` has made of ``module``; ``None`` if it was not called on it."""
    state: FSDPState | None = module.__dict__.get(ATTRIBUTE)
    return state


def states_in(module: nn.Module) -> list[tuple[str, FSDPState]]:
    """All states at or below ``module``, each once, with the names of their modules."""
    names: dict[FSDPState, list[str]] = {}
    for name, inner in module.named_modules():
        state = state_of(inner)
        if state is not None:
            names.setdefault(state, []).append(name)
    return [(", ".join(found), state) for state, found in names.items()]


class FSDPState:
    """One call of ``fully_shard``.

    Args:
        modules: on which it was called, one or several.
        unit: their parameters; ``None`` if there were none left.
        device: the compute device.
        policy: the dtypes.
        reshard_after_forward: the user's choice; ``None`` for "all but the root".
    """

    def __init__(
        self,
        modules: list[nn.Module],
        unit: Unit | None,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules, self.unit, self.device, self.policy = modules, unit, device, policy
        self.reshard_after_forward = reshard_after_forward
        self.tree: Root | None = None
        self.is_tree_root = False
        self.shared_lanes: Lanes | None = None
        self._has_begun = False
        # 1. Modules of this state that have not been run in the forward that is going on, and its number.
        self._waiting: set[nn.Module] = set()
        self._waits_in = 0
        # 3. Calls of the module that are going on inside of its own forward.
        self._num_inner = 0
        self._is_recorded = False
        # Members of the same tree with several modules.
        self._grouped: list[FSDPState] = []
        for module in modules:
            module.__dict__[ATTRIBUTE] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, prepend=False, with_kwargs=True, always_call=True)

    # --- forward ---

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The hook before. Returns the inputs as the module shall see them."""
        tree = self.current_tree()
        is_open = self._has_begun or (self.unit is not None and self.unit.phase is Phase.FORWARD)
        if is_open and self._is_inner_call(module):
            # 3. What is gathered for the outer call is there for the inner one.
            self._num_inner += 1
            return self._cast_inputs(args, kwargs)
        self._num_inner = 0
        if tree.begin_forward(self.unit):
            self._has_begun = True
            if self.device.type != "cpu":
                args, kwargs = move(self.device, (args, kwargs))
        if self.policy.param_dtype is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        if self.unit is None or self._is_between(tree):
            return args, kwargs
        tree.cycle.pre_forward(self.unit)
        watched: tuple[Any, Any] = tree.cycle.triggers[self.unit].watch_inputs((args, kwargs))
        return watched

    def _is_inner_call(self, module: nn.Module) -> bool:
        """Whether ``module``, which has been entered and as far as is known not left, is called by itself."""
        if self._waiting and module in self._waiting:
            return False
        if (self._has_begun or len(self.modules) == 1) and _calls_itself(module):
            return True
        if self._has_begun and module in self.modules:
            # 2. Begun twice, and it does not call itself: the first forward was broken off.
            self.break_off()
        return False

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        cast: tuple[Any, Any] = cast_floating(dtype, (args, kwargs))
        return cast

    def _is_between(self, tree: Root) -> bool:
        """1. Whether another module of this state has run before in this forward, and gathered for all of them."""
        if len(self.modules) == 1 or (self.unit is not None and self.unit.phase is Phase.PRE_BACKWARD):
            return False
        if self._waiting and self._waits_in == tree.cycle.num_forwards:
            return True
        self._waiting, self._waits_in = set(self.modules), tree.cycle.num_forwards
        return False

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The hook after. Returns the output as the caller shall see it."""
        if output is None and _is_after_an_exception(sys._getframe(1)):
            if self._has_begun:
                # The parts of the tree may be called next, and would take themselves for a part of this forward.
                self.break_off()
            return None
        tree = self.current_tree()
        if self.policy.output_dtype is not None:
            output = cast_floating(self.policy.output_dtype, output)
        if self._num_inner:
            self._num_inner -= 1
            return output
        if self.unit is not None and self.unit.phase is not Phase.PRE_BACKWARD:
            # 1. Each module's output, for it is not known which of them is the last to run.
            self._leave(tree, self.unit, {module}, (args, kwargs), output)
        elif self._has_begun:
            tree.cycle.watch(output)
        if self._has_begun:
            self._has_begun = False
            for state in self._grouped:
                if state.unit is not None and state._waiting and state._waits_in == tree.cycle.num_forwards:
                    # Some of its modules have not been called in this forward. Their parameters may have been used all
                    # the same, and backward may come to them before it comes to an output of the others.
                    state._leave(tree, state.unit, state._waiting, (args, kwargs), output)
            tree.end_forward()
        return output

    def _leave(self, tree: Root, unit: Unit, modules: set[nn.Module], inputs: Any, output: Any) -> None:
        """``modules`` are over; if they were the last, so is the forward of the unit."""
        self._is_recorded |= tree.cycle.watch_output(unit, inputs, output)
        self._waiting -= modules
        if not self._waiting:
            is_recorded, self._is_recorded = self._is_recorded, False
            tree.cycle.leave_forward(unit, is_recorded=is_recorded)

    def break_off(self) -> None:
        """Brings the tree back to where an iteration may begin, after an exception."""
        self._has_begun = self._is_recorded = False
        self._waiting.clear()
        if self.tree is not None:
            self.tree.fail_forward()

    # --- the tree ---

    def current_tree(self) -> Root:
        """The tree that this state is in; if there is none, one is made with this state as its root."""
        tree = self.tree
        return self._find_tree() if tree is None or tree.is_dissolved else tree

    def _find_tree(self) -> Root:
        found: dict[FSDPState, str] = {}
        for module in self.modules:
            for name, state in states_in(module):
                found.setdefault(state, "" if state is self else name)
        for state in found:
            if state.tree is not None and not state.tree.is_dissolved:
                # Parts that were unshard()ed before the whole stay gathered.
                state.tree.dissolve(keeps_gathered=True)
            if state.unit is not None and state.reshard_after_forward is None:
                # The root's backward follows its forward at once.
                state.unit.choose(reshard_after_forward=state is not self)
        tree = Root(
            [(name, state.unit) for state, name in found.items() if state.unit is not None],
            self.unit,
            self.device,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=False,
            limit_gathers=False,
            keeps_outermost=False,
            lanes=self.shared_lanes,
        )
        grouped = [state for state in found if len(state.modules) > 1]
        for state in found:
            state.tree, state._grouped = tree, grouped
            state.is_tree_root = state is self
        return tree


def _is_after_an_exception(caller: FrameType) -> bool:
    """Whether ``caller``, which calls a hook, has caught an exception, so that there is no output."""
    _, _, trace = sys.exc_info()
    return trace is not None and trace.tb_frame is caller


def _calls_itself(module: nn.Module) -> bool:
    """Whether a call of ``module`` is going on further out, besides the one that leads here."""
    frame: FrameType | None = sys._getframe(1)
    num_calls = 0
    while frame is not None:
        is_call = frame.f_code is nn.Module._wrapped_call_impl.__code__ or frame.f_code.co_name == CALLER
        num_calls += is_call and frame.f_locals.get("self") is module
        frame = frame.f_back
    return num_calls > 1
