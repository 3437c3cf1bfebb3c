"""Checks that each parameter belongs to one unit, and each model to one API.

* A parameter that is *tied* between two units. The first unit has taken the parameter, but the module of the second
  unit still refers to it. The two copies would diverge.
* A *model that is sharded through both APIs*. Such a model would have two independent roots.

Worked example: ``head.weight`` is ``embed.weight``, and each module becomes a unit. The first unit takes the tensor and
this module records a weak reference to it. The second unit finds the record and raises an error with both names.

``forward_checks.py`` checks for mistakes at the beginning of a forward, ``optimizer_checks.py`` before an optimizer
step.

*In torch:* the first case creates two copies.

Spec: CTOR-05, ORIG-16.
"""

import weakref
from collections.abc import Mapping, Sequence

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from minifsdp.engine.layout import Layout, ParamInfo
from minifsdp.engine.messages import message

# Keyed by tensor: the name of each parameter that a unit has taken, and the parameters among them that no module refers
# to any more, which optimizers must not hold. Keyed by module: the API that has sharded the module, and the names of
# the attributes that belong to a unit.
taken = WeakTensorKeyDictionary()
replaced = WeakTensorKeyDictionary()
# Layouts inside `summon_full_params`. The end of the block would overwrite the changes of a step.
summoned: weakref.WeakSet[Layout] = weakref.WeakSet()
_apis: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = (
    weakref.WeakKeyDictionary()
)


def check_free(parameters: Mapping[nn.Parameter, ParamInfo]) -> None:
    """Checks that a unit may take these parameters.

    Raises:
        ValueError: if another unit has taken one of their attributes, or another attribute with the same tensor.
    """
    for parameter, first in parameters.items():
        for info in first.places:
            if first_path := _places.get(info.module, {}).get(info.name):
                raise ValueError(
                    message(
                        "outer-before-inner",
                        path=info.path,
                        type=type(info.module).__name__,
                        first=first_path,
                    )
                )
        if parameter in taken:
            raise ValueError(
                message("tied-across-units", path=first.path, other=taken[parameter])
            )


def take(
    parameters: Mapping[nn.Parameter, ParamInfo], *, is_flat: bool = False
) -> None:
    """Records that these parameters belong to a unit. Call it when modules have the unit's tensors.

    Args:
        parameters: the original parameters, with their places.
        is_flat: whether a flat unit has taken them. Then the module can be wrapped again with new parameters.
    """
    for original, first in parameters.items():
        taken[original] = first.path
        if first.module._parameters.get(first.name) is not original:
            replaced[original] = first.path
        for info in () if is_flat else first.places:
            # Store module and name. A reference to the new tensor, even a weak one, makes `to()` fail for a DTensor.
            _places.setdefault(info.module, {})[info.name] = first.path


def check_one_api(module: nn.Module, api: str) -> None:
    """Checks that no submodule of ``module`` was sharded through another API, and records the API ``api``.

    Raises:
        ValueError: if a submodule was sharded through another API.
    """
    for name, inner in module.named_modules():
        if (other := _apis.get(inner, api)) != api:
            raise ValueError(
                message(
                    "two-apis",
                    api=api,
                    type=type(module).__name__,
                    name=name,
                    other=other,
                )
            )
    _apis[module] = api


def check_reduced(what: str, layouts: Sequence[Layout]) -> None:
    """Checks that no sharded layout has an unreduced gradient, and that no layout is inside ``summon_full_params``.

    A unit that is not sharded may train on each rank separately, as local SGD does between two averages.

    Raises:
        RuntimeError: if the check fails.
    """
    if not summoned.isdisjoint(layouts):
        raise RuntimeError(message("step-while-summoned", what=what))
    if any(layout.has_unreduced and layout.group is not None for layout in layouts):
        raise RuntimeError(message("unreduced-gradients", what=what))
