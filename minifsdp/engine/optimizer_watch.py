"""Mistakes that can be seen only where they do harm: at the step of an optimizer.

* *An optimizer that was built before wrapping.* It holds the original parameters, which no module uses any more. Its
  step changes tensors that nothing looks at; the loss stays flat and nothing says why. Every parameter that a unit has
  replaced is remembered (``misuse.py``), and the first step of each optimizer is checked against them.
* *A step after* ``no_sync()`` *without a reducing backward.* What ``.grad`` holds then is this rank's own sum in full
  size, no rank's share of a mean.

Worked example: ``optimizer = SGD(model.parameters())``, then ``model = FullyShardedDataParallel(model)``, then a step:
one warning that all 4 of its 4 parameters were replaced.

The check is a hook that PyTorch runs before the step of any optimizer. It looks at an optimizer once in its life, and
at an empty set from then on.

*In torch:* nothing in the first case, a size mismatch without a name in the second.

Spec: CTOR-05, NOSYNC-10.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minifsdp.engine.messages import message, warn
from minifsdp.engine.misuse import HoldsParameters, replaced


class HoldsGradient(HoldsParameters, Protocol):
    """What shows an unreduced gradient to the optimizer."""

    @property
    def has_unreduced(self) -> bool:
        """Whether it does so right now."""
        ...


_unreduced: weakref.WeakSet[Any] = weakref.WeakSet()
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_is_watching = False
_num_steps = 0


def watch(is_replaced: bool) -> None:
    """Called when a unit has taken a parameter: from now on optimizers are watched.

    Args:
        is_replaced: whether modules show something else in its place. Then an optimizer that was fine when it stepped
            may hold what has just been replaced.
    """
    global _is_watching
    if is_replaced:
        _checked.clear()
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_before_step)


def note_unreduced(owner: HoldsGradient) -> None:
    """Remembers that ``owner`` shows an unreduced gradient."""
    _unreduced.add(owner)


def check_reduced(what: str, owners: Iterable[HoldsGradient]) -> None:
    """Whether none of ``owners`` is left with an unreduced gradient.

    Raises:
        RuntimeError: one is.
    """
    if any(owner.has_unreduced for owner in owners):
        raise RuntimeError(message("unreduced-gradients", what=what))


def num_steps() -> int:
    """Optimizer steps so far, of any optimizer: a reason to gather again that is there on all ranks, or on none."""
    return _num_steps


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    global _num_steps
    _num_steps += 1
    if optimizer not in _checked:
        _checked.add(optimizer)
        _warn_if_stale(optimizer)
    _, *given = args
    closure = given[0] if given else kwargs.get("closure")
    if closure is None:
        _check_gradients_of(optimizer)
        return None
    # The gradients that it steps on are those that the closure leaves behind.
    checked = _with_check_after(closure, optimizer)
    return (args, {**kwargs, "closure": checked}) if not given else ((args[0], checked, *given[1:]), kwargs)


def _with_check_after(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    def checked() -> Any:
        loss = closure()
        _check_gradients_of(optimizer)
        return loss

    return checked


def _check_gradients_of(optimizer: torch.optim.Optimizer) -> None:
    if not _unreduced:
        return
    held = {id(p) for p in _parameters_of(optimizer)}
    mine = [owner for owner in _unreduced if any(id(p) in held for p in owner.local_parameters())]
    check_reduced(f"{type(optimizer).__name__}.step()", mine)
    for owner in mine:
        _unreduced.discard(owner)


def _warn_if_stale(optimizer: torch.optim.Optimizer) -> None:
    parameters = list(_parameters_of(optimizer))
    num_stale = sum(id(p) in replaced and replaced[id(p)][0]() is p for p in parameters)
    if num_stale:
        warn(message("stale-optimizer", num_stale=num_stale, number=len(parameters), type=type(optimizer).__name__))


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
