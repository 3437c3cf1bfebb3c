"""Checks for mistakes when a unit takes parameters, and when a forward begins.

* A parameter that is *tied* between two units. The first unit has taken the parameter, but the module of the second
  unit still refers to it. The two copies would diverge.
* A *model that is sharded through both APIs*. Such a model would have two independent roots.
* A ``DistributedDataParallel`` *around* sharded copies of a model, detected when a forward begins. DDP would wait for
  gradients of parameters that never get one.

Worked example: ``head.weight`` is ``embed.weight``, and each module becomes a unit. The first unit takes the tensor and
records a weak reference to it. The second unit finds the record and raises an error with both names.

``minifsdp/checks/optimizer_checks.py`` checks for mistakes that have an effect only at an optimizer step.

*In torch:* the first case creates two copies, and the last case fails an internal assertion of DDP.

Spec: CTOR-05, ORIG-16, MYTH-28.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message

# Keyed by tensor: the name of each parameter that a unit has taken, and the parameters among them that no module refers
# to any more, which optimizers must not hold. Keyed by module: the API that has sharded the module, and the names of
# the attributes that belong to a unit.
taken = WeakTensorKeyDictionary()
replaced = WeakTensorKeyDictionary()
# Layouts inside `summon_full_params`. The end of the block would overwrite the changes of a step.
summoned: weakref.WeakSet[Any] = weakref.WeakSet()
_apis: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, str | None]] = weakref.WeakKeyDictionary()


def note_taken(parameter: nn.Parameter, path: str, *, is_replaced: bool) -> None:
    """Records that ``parameter`` belongs to a unit.

    Args:
        parameter: an original parameter.
        path: the parameter's name inside the unit.
        is_replaced: whether modules refer to another tensor from now on.
    """
    for registry in (taken, replaced) if is_replaced else (taken,):
        registry[parameter] = path


def note_place(module: nn.Module, name: str, path: str | None) -> None:
    """Records that attribute ``name`` of ``module`` belongs to a unit.

    Args:
        module, name: the module, and the name of its attribute.
        path: the parameter's name inside the unit; ``None`` if the parameter is part of a flat unit.
    """
    _places.setdefault(module, {})[name] = path


def check_free(parameter: nn.Parameter, module: nn.Module, name: str, path: str) -> None:
    """Checks that a unit may take ``parameter``, which is attribute ``name`` of ``module``.

    Raises:
        ValueError: if another unit has taken this attribute, or another attribute with the same tensor.
    """
    if name in _places.get(module, {}):
        first = _places[module][name]
        raise ValueError(message("outer-before-inner", path=path, type=type(module).__name__, first=first))
    if parameter in taken:
        raise ValueError(message("tied-across-units", path=path, other=taken[parameter]))


def is_flattened(module: nn.Module, name: str) -> bool:
    """Whether attribute ``name`` of ``module`` is part of a flat unit. Later units do not take it (CTOR-17).

    This depends on the attribute and not on the tensor: the same tensor in another module is a tied parameter.
    """
    return _places.get(module, {}).get(name, "") is None


def check_one_api(module: nn.Module, api: str) -> None:
    """Checks that no submodule of ``module`` was sharded through another API, and records the API ``api``.

    Raises:
        ValueError: if a submodule was sharded through another API.
    """
    for name, inner in module.named_modules():
        other = _apis.get(inner, api)
        if other != api:
            raise ValueError(message("two-apis", api=api, type=type(module).__name__, name=name, other=other))
    _apis[module] = api


def check_reduced(what: str, layouts: Sequence[Any]) -> None:
    """Checks that no sharded layout has an unreduced gradient, and that no layout is inside ``summon_full_params``.

    A unit that is not sharded may train on each rank separately, as local SGD does between two averages.

    Raises:
        RuntimeError: if the check fails.
    """
    if not summoned.isdisjoint(layouts):
        raise RuntimeError(message("step-while-summoned", what=what))
    if any(layout.has_unreduced and layout.all_gather_group is not None for layout in layouts):
        raise RuntimeError(message("unreduced-gradients", what=what))


def is_only_called_in_parts(module: nn.Module) -> bool:
    """Whether ``module`` is a list or dict. It has no forward, so its unit would never be all-gathered.

    Other modules without a forward may have another method that issues the all-gather.
    """
    lists = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return isinstance(module, lists) and type(module).forward is nn.Module.forward


def check_not_in_ddp(owned: Iterable[tuple[Iterable[nn.Parameter], MeshGroups]]) -> None:
    """Checks that no DDP around the model would average sharded gradients. Called before a forward.

    A DDP is allowed if it ignores these parameters, or if FSDP already averages gradients over all of its ranks.

    Raises:
        RuntimeError: if a DDP waits for gradients of ``owned`` parameters that FSDP does not average over all its
            ranks.
    """
    around = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if around is None or not torch.is_grad_enabled():
        return
    ranks = dist.get_process_group_ranks(around.process_group)
    apart = {parameter for parameters, mesh in owned if not mesh.covers(ranks) for parameter in parameters}
    for name, parameter in around.module.named_parameters():
        if parameter in apart and parameter.requires_grad and name not in around.parameters_to_ignore:
            raise RuntimeError(message("ddp-around", name=name, ranks=ranks))
