"""Mistakes that can be seen only where they do harm: at the step of an optimizer.

* *An optimizer that was built before wrapping.* It holds the original parameters, which no module uses any more. Its
  step changes tensors that nothing looks at; the loss stays flat and nothing says why. Every parameter that a unit has
  replaced is remembered (``misuse.py``), and the first step of each optimizer is checked against them.
* *A step after* ``no_sync()`` *without a reducing backward.* What ``.grad`` holds then is this rank's own sum in full
  size, no rank's share of a mean.

Worked example: ``optimizer = SGD(model.parameters())``, then ``model = FullyShardedDataParallel(model)``, then a step:
one warning that all 4 of its 4 parameters were replaced.

* *A step inside of* ``summon_full_params()``. What the optimizer owns is hidden there, and overwritten on leaving.

The check is a hook that PyTorch runs before the step of any optimizer. It looks at an optimizer once in its life, and
at an empty set from then on.

*In torch:* nothing in the first case, a size mismatch without a name in the second.

Spec: CTOR-05, NOSYNC-10, FUZZ-06.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minifsdp.engine import ledger
from minifsdp.engine.layout import Layout
from minifsdp.engine.messages import message, warn
from minifsdp.engine.misuse import replaced

_unreduced: weakref.WeakSet[Layout] = weakref.WeakSet()
# Whose full parameters are in the user's hands; a step would be lost, or go to what is about to be overwritten.
summoned: weakref.WeakSet[Layout] = weakref.WeakSet()
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
# Called before the state dict of an optimizer is taken; attached from outside, see ``minifsdp/__init__.py``.
before_saving: list[Callable[..., None]] = []


def watch(is_replaced: bool) -> None:
    """Called when a unit has taken a parameter: from now on optimizers are watched.

    Args:
        is_replaced: whether modules show something else in its place. Then an optimizer that was fine when it stepped
            may hold what has just been replaced.
    """
    if is_replaced:
        _checked.clear()
    _begin()


@functools.cache
def _begin() -> None:
    register_optimizer_step_pre_hook(_before_step)


def note_unreduced(layout: Layout) -> None:
    """Remembers that ``layout`` shows the optimizer an unreduced gradient."""
    _unreduced.add(layout)


def check_reduced(what: str, layouts: Iterable[Layout]) -> None:
    """Whether none of ``layouts`` is left with an unreduced gradient, and none is summoned.

    Raises:
        RuntimeError: one is.
    """
    chosen = list(layouts)
    if not summoned.isdisjoint(chosen):
        raise RuntimeError(message("step-while-summoned", what=what))
    if any(layout.has_unreduced for layout in chosen):
        raise RuntimeError(message("unreduced-gradients", what=what))


def num_steps() -> int:
    """Optimizer steps so far, of any optimizer: a reason to gather again that is there on all ranks, or on none."""
    return ledger.num_steps


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    ledger.num_steps += 1
    if optimizer not in _checked:
        _checked.add(optimizer)
        for look in before_saving:
            optimizer.register_state_dict_pre_hook(look)
        _warn_if_stale(optimizer)
    _, *given = args
    closure = given[0] if given else kwargs.get("closure")
    if closure is None:
        _check_gradients_of(optimizer)
        return None
    checked = functools.partial(_close_and_check, closure, optimizer)
    return (args, {**kwargs, "closure": checked}) if not given else ((args[0], checked, *given[1:]), kwargs)


def _close_and_check(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
    """The gradients that an optimizer steps on are those that its closure leaves behind."""
    loss = closure()
    _check_gradients_of(optimizer)
    return loss


def _check_gradients_of(optimizer: torch.optim.Optimizer) -> None:
    if not (_unreduced or summoned):
        return
    held = set(_parameters_of(optimizer))
    mine = [layout for layout in _unreduced | summoned if not held.isdisjoint(layout.local_parameters())]
    check_reduced(f"{type(optimizer).__name__}.step()", mine)
    _unreduced.difference_update(mine)


def _warn_if_stale(optimizer: torch.optim.Optimizer) -> None:
    parameters = _parameters_of(optimizer)
    num_stale = sum(parameter in replaced for parameter in parameters)
    if num_stale:
        warn(message("stale-optimizer", num_stale=num_stale, number=len(parameters), type=type(optimizer).__name__))


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
