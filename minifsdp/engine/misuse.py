"""Mistakes that are noticed where they are made: when a unit takes parameters, and when a forward begins.

A parameter that is *tied* between two units: the first unit has taken it, the second module still shows it, and from
then on the two copies would drift apart. A *model that is sharded in two ways*, whose two trees would know nothing of
each other. And when a forward begins, a ``DistributedDataParallel`` *around* sharded copies of a model: it waits for
gradients in a place where none arrive.

Worked example: ``head.weight`` is ``embed.weight``, and each module becomes a unit. The first takes the tensor, which
is remembered by a weak reference; the second finds it in the registry, and is refused with both names.

What does harm only later, at an optimizer's step, is watched for in ``optimizer_watch.py``.

*In torch:* two copies in the first case, an internal assertion of DDP in the last.

Spec: CTOR-05, ORIG-16, MYTH-28.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from minifsdp.engine.mesh import Mesh
from minifsdp.engine.messages import message

# By identity: the unit's name for each parameter that was taken, and those of them that modules show no more, which
# optimizers must not hold.
_taken = WeakTensorKeyDictionary()
replaced = WeakTensorKeyDictionary()
# Called with each new layout; see ``optimizer_watch.py``.
watchers: list[Callable[[Any], None]] = []
_doors: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, str | None]] = weakref.WeakKeyDictionary()


def note_taken(parameter: nn.Parameter, path: str, *, is_replaced: bool) -> None:
    """Remembers that ``parameter`` belongs to a unit.

    Args:
        parameter: the user's.
        path: its name in the unit.
        is_replaced: whether modules show something else in its place from now on.
    """
    for registry in (_taken, replaced) if is_replaced else (_taken,):
        registry[parameter] = path


def note_place(module: nn.Module, name: str, path: str | None) -> None:
    """Remembers that what ``module`` shows as ``name`` belongs to a unit.

    Args:
        module, name: the place.
        path: the unit's name for it; ``None`` if it is part of a flat unit.
    """
    _places.setdefault(module, {})[name] = path


def check_free(parameter: nn.Parameter, module: nn.Module, name: str, path: str) -> None:
    """Whether a unit may take ``parameter``, which ``module`` shows as ``name``.

    Raises:
        ValueError: another unit has taken what is in this place, or the same tensor in another one.
    """
    if name in _places.get(module, {}):
        first = _places[module][name]
        raise ValueError(message("outer-before-inner", path=path, type=type(module).__name__, first=first))
    if parameter in _taken:
        raise ValueError(message("tied-across-units", path=path, other=_taken[parameter]))


def is_flattened(module: nn.Module, name: str) -> bool:
    """Whether what ``module`` shows as ``name`` is part of a flat unit; one made later leaves it there (CTOR-17).

    A question about the place and not about the tensor: the same tensor in another module is a tie.
    """
    return _places.get(module, {}).get(name, "") is None


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


def check_not_in_ddp(owned: Iterable[tuple[Iterable[nn.Parameter], Mesh]]) -> None:
    """Whether a forward that will be trained goes through a DDP that would have to average sharded gradients.

    A DDP around is welcome if it was told to leave these parameters alone, or if its ranks are among those over whose
    gradients the mean is taken anyway.

    Raises:
        RuntimeError: it waits for gradients of ``owned`` parameters, and the mean lacks ranks.
    """
    around = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if around is None or not torch.is_grad_enabled():
        return
    ranks = dist.get_process_group_ranks(around.process_group)
    apart = {parameter for parameters, mesh in owned if not mesh.covers(ranks) for parameter in parameters}
    for name, parameter in around.module.named_parameters():
        if parameter in apart and parameter.requires_grad and name not in around.parameters_to_ignore:
            raise RuntimeError(message("ddp-around", name=name, ranks=ranks))
