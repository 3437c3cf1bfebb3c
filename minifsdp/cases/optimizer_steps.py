"""Counts the steps of optimizers, because unsharded parameters from before a step are stale.

A program keeps the parameters unsharded after a backward, and its optimizer has a fused kernel::

    fully_shard(model)
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    loss(model(batch)).backward()
    optimizer.step()
    model(batch)                        # needs the new values

Without this case, the second forward computes with the values from before the step. The version of a tensor does not
show every change: fused kernels, and list operators on DTensors, do not increase it. So a hook that PyTorch runs before
the step of any optimizer counts the steps for each root. A step counts for a root only if the optimizer holds
parameters of its units. Otherwise, if one rank stepped an unrelated optimizer, only that rank would issue an
all-gather.

Worked example: ``SGD(model.parameters()).step()`` increases the count of the model's root from 0 to 1. A unit that was
all-gathered at 0 is stale.

The hook looks up the parameters of an optimizer once, and again if the sizes of its groups change, a new unit is
created, or a unit has accepted other parameters. It is installed with the first unit and removed with the last one.
Each front end calls `OptimizerSteps.add` for a new unit. The hook also calls the observers of optimizers, see
``engine/events.py``.

*In torch:* no count. With ``set_reshard_after_backward(False)``, the next forward uses the old values.

Spec: FRESH-04, FRESH-06.
"""

import traceback
import weakref
from collections.abc import Callable
from threading import RLock
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from minifsdp.engine.events import events
from minifsdp.engine.layout import Layout, Steps
from minifsdp.engine.root import RootState


class OptimizerSteps:
    """Counts the steps of optimizers that hold parameters of units. The process has one, `optimizer_steps`."""

    def __init__(self) -> None:
        # All layouts, and the layouts of each optimizer that has taken a step, with the sizes of its groups then.
        self._layouts: weakref.WeakSet[Layout] = weakref.WeakSet()
        self._held = weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[list[int], weakref.WeakSet[Layout]]
        ]()
        # Ranks may be threads of one process. One of them may add layouts while another one iterates over them.
        self._lock = RLock()
        # The handle of the hook while it is installed.
        self._hook: Any = None

    def add(self, layout: Layout) -> None:
        """Called when a unit has taken parameters. From then on, the steps of optimizers are counted."""
        # An optimizer that was seen earlier may hold parameters that this unit has replaced.
        with self._lock:
            self.forget()
            if self._hook is None:
                self._hook = torch_optimizer.register_optimizer_step_pre_hook(
                    self._before_step
                )
            self._layouts.add(layout)
        weakref.finalize(layout, self._end).atexit = False

    def forget(self) -> None:
        """Called when a unit has accepted other parameters. Each optimizer looks up its layouts again."""
        with self._lock:
            self._held.clear()

    def _end(self) -> None:
        """Called when a layout was deleted. Removes the hook if this was the last layout."""
        if self._hook is None or any(True for _ in self._layouts):
            return
        # While a step runs, PyTorch iterates over the hooks. So garbage collection during a step keeps the hook.
        if all(
            frame.f_code.co_filename != torch_optimizer.__file__
            for frame, _ in traceback.walk_stack(None)
        ):
            self._hook.remove()
            self._hook = None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        layouts = self._count_step(optimizer)
        for observer in events.optimizers:
            observer.step_begins(layouts)
        _, *given = args
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            self._gradients_ready(optimizer, layouts)
            return None
        closure = self._counting(optimizer, closure)
        if given:
            return (args[0], closure, *given[1:]), kwargs
        return args, {**kwargs, "closure": closure}

    def _counting(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        def counted_closure() -> Any:
            loss = closure()
            self._gradients_ready(optimizer, self._layouts_of(optimizer))
            # The closure may have all-gathered parameters, which the optimizer changes next.
            self._count_step(optimizer)
            return loss

        return counted_closure

    def _gradients_ready(
        self, optimizer: torch.optim.Optimizer, layouts: list[Layout]
    ) -> None:
        for observer in events.optimizers:
            observer.gradients_ready(optimizer, layouts)

    def _count_step(self, optimizer: torch.optim.Optimizer) -> list[Layout]:
        """Counts a step for each root whose parameters ``optimizer`` holds. Returns the layouts of these parameters."""
        layouts = self._layouts_of(optimizer)
        for steps in {layout.steps for layout in layouts}:
            steps.count += 1
        for layout in layouts:
            if any(parameter.grad is not None for parameter in layout.local_parameters):
                layout.stepped_at = layout.steps.count
        return layouts

    def _layouts_of(self, optimizer: torch.optim.Optimizer) -> list[Layout]:
        """The layouts whose parameters ``optimizer`` holds."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        known = self._held.get(optimizer)
        if known is not None and known[0] == sizes:
            return list(known[1])
        with self._lock:
            held = {
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
            layouts = list(self._layouts)
            found = [
                layout
                for layout in layouts
                if not held.isdisjoint(layout.local_parameters)
            ]
            for observer in events.optimizers:
                observer.new_optimizer(optimizer, found, layouts)
            self._held[optimizer] = sizes, weakref.WeakSet(found)
        return found


optimizer_steps = OptimizerSteps()


def count_together(root_state: RootState) -> None:
    """Makes all units of a root share the number of steps. It is the largest number that one of them had before."""
    layouts = [unit.layout for unit in root_state.units]
    steps = Steps()
    steps.count = max((layout.steps.count for layout in layouts), default=0)
    for layout in layouts:
        layout.steps = steps
