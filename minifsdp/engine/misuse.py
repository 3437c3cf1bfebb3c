"""Mistakes that would otherwise train on, silently and wrongly: noticed at the next optimizer step.

Two of them cannot be seen where they are made, only where they do harm:

* *An optimizer that was built before wrapping.* It holds the original parameters, which no module uses any more. Its
  step changes tensors that nothing looks at; the loss stays flat and nothing says why. Every parameter that a unit has
  replaced is remembered here by a weak reference, and the first step of each optimizer is checked against them.
* *A step after* ``no_sync()`` *without a reducing backward.* What ``.grad`` holds then is this rank's own sum in full
  size, no rank's share of a mean.

A third is noticed at construction: a parameter that is *tied* between two units. The first unit has taken it; the
second module still shows it, and from then on the two copies would drift apart. So is a *model that is sharded in two
ways*, whose two trees would know nothing of each other. And when a forward begins: a ``DistributedDataParallel``
*around* sharded copies of a model. It waits for gradients in a place where none arrive, so copies would drift apart.

The check is a hook that PyTorch runs before the step of any optimizer. It looks at an optimizer once in its life, and
at an empty set from then on.

*In torch:* nothing in the first case, a size mismatch without a name in the second, two copies in the third, an
internal assertion of DDP in the last.

Spec: CTOR-05, NOSYNC-10, ORIG-16, MYTH-28.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minifsdp.engine.mesh import Mesh
from minifsdp.engine.messages import message, warn


class HoldsGradient(Protocol):
    """What shows an unreduced gradient to the optimizer."""

    @property
    def has_unreduced(self) -> bool:
        """Whether it does so right now."""
        ...

    def local_parameters(self) -> Sequence[nn.Parameter]:
        """What the optimizer owns of it."""
        ...


Registry = dict[int, tuple[weakref.ref[nn.Parameter], str]]

_taken: Registry = {}
_replaced: Registry = {}
_doors: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()
_flattened: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
_unreduced: weakref.WeakSet[Any] = weakref.WeakSet()
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_is_watching = False
_num_steps = 0


def note_taken(parameter: nn.Parameter, path: str, *, is_replaced: bool) -> None:
    """Remembers that ``parameter`` belongs to a unit, and from now on watches optimizers.

    Args:
        parameter: the user's.
        path: its name in the unit.
        is_replaced: whether modules show something else in its place from now on.
    """
    global _is_watching
    for registry in (_taken, _replaced) if is_replaced else (_taken,):
        _remember(registry, parameter, path)
    if is_replaced:
        # An optimizer that was fine when it stepped may hold what has just been replaced.
        _checked.clear()
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_before_step)


def _remember(registry: Registry, parameter: nn.Parameter, path: str) -> None:
    key = id(parameter)
    registry[key] = (weakref.ref(parameter, lambda _: registry.pop(key, None)), path)


def note_unreduced(owner: HoldsGradient) -> None:
    """Remembers that ``owner`` shows an unreduced gradient."""
    _unreduced.add(owner)


def check_not_tied(parameter: nn.Parameter, path: str) -> None:
    """Whether a unit may take ``parameter``.

    Raises:
        ValueError: another unit has taken it already.
    """
    reference, other = _taken.get(id(parameter), (None, ""))
    if reference is not None and reference() is parameter:
        raise ValueError(message("tied-across-units", path=path, other=other))


def note_place(module: nn.Module, name: str, path: str) -> None:
    """Remembers that what ``module`` shows as ``name`` belongs to a unit, in which it is called ``path``."""
    _places.setdefault(module, {})[name] = path


def check_place(module: nn.Module, name: str, path: str) -> None:
    """Whether a unit may take what ``module`` shows as ``name``.

    Raises:
        ValueError: another unit has taken it already.
    """
    if name in _places.get(module, {}):
        raise ValueError(
            message("outer-before-inner", path=path, type=type(module).__name__, first=_places[module][name])
        )


def note_flattened(module: nn.Module, name: str) -> None:
    """Remembers that what ``module`` shows as ``name`` is part of a flat unit."""
    _flattened.setdefault(module, set()).add(name)


def is_flattened(module: nn.Module, name: str) -> bool:
    """Whether what ``module`` shows as ``name`` is part of a flat unit; one made later leaves it there (CTOR-17).

    A question about the place and not about the tensor: the same tensor in another module is a tie.
    """
    return name in _flattened.get(module, ())


def check_one_door(module: nn.Module, door: str) -> None:
    """Whether nothing in ``module`` was sharded by way of another door; remembers ``door`` if so.

    Raises:
        ValueError: something was.
    """
    for name, inner in module.named_modules():
        other = _doors.get(inner, door)
        if other != door:
            raise ValueError(message("two-doors", door=door, type=type(module).__name__, name=name, other=other))
    _doors[module] = door


def is_only_called_in_parts(module: nn.Module) -> bool:
    """Whether ``module`` is a list or dict of modules, which is never called, so that nothing would gather its unit.

    Other modules without a forward may have another method that gathers.
    """
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def check_reduced(what: str, owners: Iterable[HoldsGradient]) -> None:
    """Whether none of ``owners`` is left with an unreduced gradient.

    Raises:
        RuntimeError: one is.
    """
    if any(owner.has_unreduced for owner in owners):
        raise RuntimeError(message("unreduced-gradients", what=what))


def check_not_in_ddp(owners: Iterable[tuple[HoldsGradient, Mesh]]) -> None:
    """Whether a forward that will be trained goes through a DDP that would have to average sharded gradients.

    A DDP around is welcome if it was told to leave these parameters alone, or if its ranks are among those over whose
    gradients the mean is taken anyway.

    Raises:
        RuntimeError: it waits for gradients of ``owners``, and the mean lacks ranks.
    """
    around = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if around is None or not torch.is_grad_enabled():
        return
    ranks = dist.get_process_group_ranks(around.process_group)
    apart = {p for owner, mesh in owners if not mesh.covers(ranks) for p in owner.local_parameters()}
    for name, parameter in around.module.named_parameters():
        if parameter in apart and parameter.requires_grad and name not in around.parameters_to_ignore:
            raise RuntimeError(message("ddp-around", name=name, ranks=ranks))


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
    num_stale = sum(id(p) in _replaced and _replaced[id(p)][0]() is p for p in parameters)
    if num_stale:
        warn(message("stale-optimizer", num_stale=num_stale, number=len(parameters), type=type(optimizer).__name__))


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
