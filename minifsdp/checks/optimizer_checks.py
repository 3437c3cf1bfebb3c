"""Checks before each optimizer step, for mistakes that have an effect only in the step.

* *An optimizer that was built before wrapping.* It holds the original parameters, which no module uses any more. Its
  step changes these tensors, but not the model. The loss does not decrease, and no error appears. So
  ``ownership.py`` records every parameter that a unit has replaced, and the first step of each optimizer checks
  for them.
* *A step after* ``no_sync()`` *without a reducing backward.* Then ``.grad`` holds the sum of this rank only, in the
  unsharded size, instead of this rank's shard of the mean.
* *Parameters that were added after sharding.* No unit manages them, so each rank trains its own copy.
  `OptimizerChecks.sharded` records the parameters of each module when it is sharded. The first step of each optimizer
  looks for others.
* *A step after the watchdog has aborted collectives*, on an accelerator. The gradients are invalid.
* *A step inside* ``summon_full_params()``. Inside the block, the modules do not use the optimizer's parameters. The end
  of the block overwrites these parameters.

Worked example: ``optimizer = SGD(model.parameters())``, then ``model = FullyShardedDataParallel(model)``, then a step:
one warning that all 4 of its 4 parameters were replaced.

This package counts the steps (``cases/optimizer_steps.py``) and calls `OptimizerChecks` before each step.

*In torch:* no check in the first case; in the second case, an error about a size mismatch without a parameter name.

Spec: CTOR-05, NOSYNC-10, FUZZ-06, FRESH-04, FRESH-06.
"""

import weakref
from collections.abc import Iterable, Sequence
from threading import RLock

import torch
from torch import nn

from minifsdp.checks import ownership
from minifsdp.checks.collective_log import log
from minifsdp.checks.rank_checks import read_all
from minifsdp.engine.layout import Layout, full_name
from minifsdp.engine.messages import message, warn

# Parts of the class names of optimizers whose step computes norms, products or matrices of whole parameters.
_WHOLE = ("lbfgs", "adafactor", "muon", "lamb", "lars", "shampoo", "soap")


class OptimizerChecks:
    """Checks the steps of optimizers that hold parameters of units. An observer of `Events.optimizers`."""

    def __init__(self) -> None:
        # Layouts whose parameters have an unreduced gradient in ``.grad``.
        self._unreduced: weakref.WeakSet[Layout] = weakref.WeakSet()
        # The optimizers whose `state_dict()` reads the answers of all ranks first.
        self._with_hook = weakref.WeakSet[torch.optim.Optimizer]()
        # The names of the parameters that each module had when it was sharded.
        self._names = weakref.WeakKeyDictionary[nn.Module, frozenset[str]]()
        # Ranks may be threads of one process. One of them may add modules while another one iterates over them.
        self._lock = RLock()

    def sharded(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Records the names of the parameters of ``modules``."""
        with self._lock:
            for _, module in modules:
                self._names[module] = frozenset(module._parameters)

    def unreduced(self, layout: Layout) -> None:
        """The next step of an optimizer with parameters of ``layout`` is checked."""
        self._unreduced.add(layout)

    def new_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        found: Sequence[Layout],
        known: Sequence[Layout],
    ) -> None:
        """Checks for parameters that the optimizer must not hold."""
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        number = len(parameters)
        kind = type(optimizer).__name__
        if num_stale := sum(
            parameter in ownership.replaced for parameter in parameters
        ):
            warn(
                message(
                    "stale-optimizer", num_stale=num_stale, number=number, type=kind
                )
            )
        held = set(parameters)
        if num_unsharded := sum(
            len(held.intersection(layout.leaves)) for layout in known
        ):
            warn(
                message(
                    "unsharded-in-optimizer",
                    num_unsharded=num_unsharded,
                    number=number,
                    type=kind,
                )
            )
        unmanaged = held.difference(*(layout.local_parameters for layout in known))
        with self._lock:
            self._warn_if_added({one for one in unmanaged if one.requires_grad})
        is_whole = any(
            name in one.__name__.lower()
            for one in type(optimizer).__mro__
            for name in _WHOLE
        )
        if is_whole and any(one.group and not one.shards_are_dtensors for one in found):
            warn(message("whole-parameter-optimizer", type=kind))
        if found and optimizer not in self._with_hook:
            self._with_hook.add(optimizer)
            optimizer.register_state_dict_pre_hook(read_all)

    def _warn_if_added(self, unmanaged: set[torch.Tensor]) -> None:
        """Issues a warning if parameters in ``unmanaged`` were added to a sharded model later."""
        if not unmanaged:
            return
        added = []
        # `named_modules` leaves out the modules of this set, and what is only below them.
        known = set(self._names)
        for module, names in list(self._names.items()):
            known.discard(module)
            added += [
                f"{full_name(path, name)!r} of {type(module).__name__}"
                for path, one in module.named_modules(known)
                for name, parameter in one._parameters.items()
                if parameter in unmanaged and (one is not module or name not in names)
            ]
        if added:
            warn(message("added-after-sharding", parameters=", ".join(added)))

    def step_begins(self, layouts: Sequence[Layout]) -> None:
        """Counts the step.

        Raises:
            RuntimeError: if the gradients come from collectives that were aborted.
        """
        if layouts and log.fatal_error:
            raise RuntimeError(log.fatal_error)
        log.num_steps += bool(layouts)

    def gradients_ready(
        self, optimizer: torch.optim.Optimizer, layouts: Sequence[Layout]
    ) -> None:
        """Checks the gradients that the optimizer reads next.

        Raises:
            RuntimeError: if they are unreduced, or the model is inside ``summon_full_params``.
        """
        if not (self._unreduced or ownership.summoned):
            return
        mine = [
            layout
            for layout in layouts
            if layout in self._unreduced or layout in ownership.summoned
        ]
        if waiting := [
            layout.name
            for layout in mine
            if layout.shards_are_dtensors and layout.has_unreduced
        ]:
            warn(
                message(
                    "step-before-reduction",
                    units=waiting,
                    type=type(optimizer).__name__,
                )
            )
            return
        ownership.check_reduced(f"{type(optimizer).__name__}.step()", mine)
        self._unreduced.difference_update(mine)
