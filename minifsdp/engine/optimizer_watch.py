"""Checks before each optimizer step, for mistakes that have an effect only in the step.

* *An optimizer that was built before wrapping.* It holds the original parameters, which no module uses any more. Its
  step changes these tensors, but not the model. The loss does not decrease, and no error appears. So ``validation.py``
  records every parameter that a unit has replaced, and the first step of each optimizer checks for them.
* *A step after* ``no_sync()`` *without a reducing backward.* Then ``.grad`` holds the sum of this rank only, in the
  unsharded size, instead of this rank's shard of the mean.
* *Parameters that were added after sharding.* No unit manages them, so each rank trains its own copy. `note_modules`
  records the parameters of each module when it is sharded. The first step of each optimizer looks for others.
* *A step after the watchdog has aborted collectives*, on an accelerator. The gradients are invalid.
* *A step inside* ``summon_full_params()``. Inside the block, the modules do not use the optimizer's parameters. The end
  of the block overwrites these parameters.

Worked example: ``optimizer = SGD(model.parameters())``, then ``model = FullyShardedDataParallel(model)``, then a step:
one warning that all 4 of its 4 parameters were replaced.

The check is a hook that PyTorch runs before the step of any optimizer. It looks up the parameters of an optimizer once,
and again if the optimizer's groups change or a new unit is created.

The hook also counts the steps for each root, because the version of a tensor does not show every change: fused kernels,
and list operators on DTensors, do not increase it. Unsharded parameters from before a step are stale. A step counts for
a root only if the optimizer holds parameters of its units. Otherwise, if one rank stepped an unrelated optimizer, only
that rank would issue an all-gather.

The hook is installed with the first unit and removed with the last one.

*In torch:* no check in the first case; in the second case, an error about a size mismatch without a parameter name.

Spec: CTOR-05, NOSYNC-10, FUZZ-06, FRESH-04, FRESH-06.
"""

import traceback
import weakref
from collections.abc import Iterable, Sequence
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from minifsdp.engine.collective_log import log
from minifsdp.engine.layout import Layout, full_name
from minifsdp.engine.messages import message, warn
from minifsdp.engine.rank_checks import read_all
from minifsdp.engine.validation import replaced

# Parts of the class names of optimizers whose step computes norms, products or matrices of whole parameters.
_WHOLE = ("lbfgs", "adafactor", "muon", "lamb", "lars", "shampoo", "soap")


class OptimizerWatch:
    """Checks the steps of optimizers that hold parameters of units. The process has one, `watch`.

    Attributes:
        summoned: layouts inside `summon_full_params`. The end of the block would overwrite the changes of a step.
        unreduced: layouts whose parameters have an unreduced gradient in ``.grad``.
    """

    def __init__(self) -> None:
        self.summoned: weakref.WeakSet[Layout] = weakref.WeakSet()
        self.unreduced: weakref.WeakSet[Layout] = weakref.WeakSet()
        # All layouts, and the layouts of each optimizer that has taken a step, with the sizes of its groups then.
        self._layouts: weakref.WeakSet[Layout] = weakref.WeakSet()
        self._held = weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], weakref.WeakSet[Layout]]]()
        # The optimizers whose `state_dict()` reads the answers of all ranks first.
        self._with_hook = weakref.WeakSet[torch.optim.Optimizer]()
        # The names of the parameters that each module had when it was sharded.
        self._names = weakref.WeakKeyDictionary[nn.Module, frozenset[str]]()
        # Ranks may be threads of one process. One of them may add layouts while another one iterates over them.
        self._lock = RLock()
        # The handle of the hook while it is installed.
        self._hook: Any = None

    def add(self, layout: Layout) -> None:
        """Called when a unit has taken parameters. From then on, the steps of optimizers are checked."""
        # An optimizer that passed the check earlier may hold parameters that this unit has replaced.
        with self._lock:
            self._held.clear()
            if self._hook is None:
                self._hook = torch_optimizer.register_optimizer_step_pre_hook(self._before_step)
            self._layouts.add(layout)
        weakref.finalize(layout, self._end).atexit = False

    def note_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Called when ``modules``, with their paths, are sharded. Records the names of their parameters."""
        with self._lock:
            for _, module in modules:
                self._names[module] = frozenset(module._parameters)

    def _warn_if_added(self, unmanaged: set[torch.Tensor]) -> None:
        """Issues a warning if parameters in ``unmanaged`` were added to a sharded model later."""
        if not unmanaged:
            return
        known, added = self._names, []
        for module, names in list(known.items()):
            new = [(name, child) for name, child in module.named_children() if child not in known]
            below = [place for name, child in new for place in child.named_modules(prefix=name)]
            for path, one in [("", module), *((path, one) for path, one in below if one not in known)]:
                for name, parameter in one._parameters.items():
                    if parameter in unmanaged and (one is not module or name not in names):
                        added.append(f"{full_name(path, name)!r} of {type(module).__name__}")
        if added:
            warn(message("added-after-sharding", parameters=", ".join(added)))

    def _end(self) -> None:
        """Called when a layout was deleted. Removes the hook if this was the last layout."""
        if self._hook is None or any(True for _ in self._layouts):
            return
        # While a step runs, PyTorch iterates over the hooks. So garbage collection during a step keeps the hook.
        if all(frame.f_code.co_filename != torch_optimizer.__file__ for frame, _ in traceback.walk_stack(None)):
            self._hook.remove()
            self._hook = None

    def check_reduced(self, what: str, layouts: Sequence[Layout]) -> None:
        """Checks that no sharded layout has an unreduced gradient, and that no layout is inside ``summon_full_params``.

        A unit that is not sharded may train on each rank separately, as local SGD does between two averages.

        Raises:
            RuntimeError: if the check fails.
        """
        if not self.summoned.isdisjoint(layouts):
            raise RuntimeError(message("step-while-summoned", what=what))
        if any(layout.has_unreduced and layout.all_gather_group is not None for layout in layouts):
            raise RuntimeError(message("unreduced-gradients", what=what))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._count_step(optimizer):
            log.num_steps += 1
        _, *given = args
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            self._check_gradients_of(optimizer)
            return None

        def checked_closure() -> Any:
            loss = closure()
            self._check_gradients_of(optimizer)
            # The closure may have all-gathered parameters, which the optimizer changes next.
            self._count_step(optimizer)
            return loss

        if given:
            return (args[0], checked_closure, *given[1:]), kwargs
        return args, {**kwargs, "closure": checked_closure}

    def _count_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Counts a step for each root whose parameters ``optimizer`` holds. Returns whether there are any."""
        layouts = self._layouts_of(optimizer)
        if layouts and log.fatal_error:
            # The gradients come from collectives that were aborted.
            raise RuntimeError(log.fatal_error)
        for steps in {layout.steps for layout in layouts}:
            steps.count += 1
        for layout in layouts:
            if any(parameter.grad is not None for parameter in layout.local_parameters()):
                layout.stepped_at = layout.steps.count
        return bool(layouts)

    def _check_gradients_of(self, optimizer: torch.optim.Optimizer) -> None:
        if self.unreduced or self.summoned:
            marked = self.unreduced | self.summoned
            mine = [layout for layout in self._layouts_of(optimizer) if layout in marked]
            waiting = [layout.name for layout in mine if layout.shards_are_distributed and layout.has_unreduced]
            if waiting:
                warn(message("step-before-reduction", units=waiting, type=type(optimizer).__name__))
                return
            self.check_reduced(f"{type(optimizer).__name__}.step()", mine)
            self.unreduced.difference_update(mine)

    def _layouts_of(self, optimizer: torch.optim.Optimizer) -> list[Layout]:
        """The layouts whose parameters ``optimizer`` holds. The first call checks for replaced parameters."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        known = self._held.get(optimizer)
        if known is not None and known[0] == sizes:
            return list(known[1])
        with self._lock:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            num_stale, kind = sum(parameter in replaced for parameter in parameters), type(optimizer).__name__
            if num_stale:
                warn(message("stale-optimizer", num_stale=num_stale, number=len(parameters), type=kind))
            held = set(parameters)
            num_unsharded = sum(len(held.intersection(layout.leaves)) for layout in self._layouts)
            if num_unsharded:
                warn(message("unsharded-in-optimizer", num_unsharded=num_unsharded, number=len(parameters), type=kind))
            managed = [layout.local_parameters() for layout in self._layouts]
            self._warn_if_added({one for one in held.difference(*managed) if one.requires_grad})
            found = [layout for layout in self._layouts if not held.isdisjoint(layout.local_parameters())]
            is_whole = any(name in one.__name__.lower() for one in type(optimizer).__mro__ for name in _WHOLE)
            if is_whole and any(one.all_gather_group and not one.shards_are_distributed for one in found):
                warn(message("whole-parameter-optimizer", type=kind))
            if found and optimizer not in self._with_hook:
                self._with_hook.add(optimizer)
                optimizer.register_state_dict_pre_hook(read_all)
            self._held[optimizer] = sizes, weakref.WeakSet(found)
        return found


watch = OptimizerWatch()
