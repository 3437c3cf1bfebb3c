"""Maps each parameter of the optimizer to original parameters, and to their elements in the local shard.

An optimizer identifies parameters as objects, and in its state dict as numbers. In a wrapped model these parameters are
shards: one flat parameter for a whole unit, or one shard per original parameter. A checkpoint must contain the original
parameters by name. `ParameterNames` maps between both.

Worked example, a unit ``0`` with ``weight`` (2 x 3) and ``bias`` (3) on two ranks; rank 1 has the shard ``w b b b .``::

    use_orig_params   the optimizer of rank 1 owns      original names               elements in rank 1's shard
    False             _flat_param, 5 elements           0.weight, 0.bias             0:1, 1:4
    True              weight, 1 element                 0.weight                     0:1
                      bias, 3 elements                  0.bias                       1:4

Both cases use one table. For each of the unit's parameters it contains the *owner*, which is the optimizer's parameter
for it, and its range in the local shard. So the modules for saving and loading treat both cases alike: they assemble a
local shard, or split one.

A shared parameter has the name under which it is found first, as in ``named_parameters()``.

*In torch:* ``_get_param_to_fqns``, ``_get_flat_param_to_fqn``, ``_get_fqn_to_fsdp_param_info`` and
``_get_param_key_to_param``, four walks over the tree for as many dicts.

Spec: OSD-03, OSD-08, OSD-09.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from minifsdp.checkpoint.codec import UnitCodec
from minifsdp.checkpoint.names import dotted, plain_path
from minifsdp.engine.messages import detail
from minifsdp.fsdp1.full_params import check_idle
from minifsdp.fsdp1.wrapper import Wrapper


class UnitNames(UnitCodec):
    """The parameter names of one unit, and the optimizer's parameters for them.

    Args:
        wrapper: the wrapper of the unit.
        prefix: the wrapper's plain name in the model, with a dot, or ``""``.

    Attributes:
        names: by number, the plain name under which each parameter is found first.
        is_flat: whether the optimizer has one flat parameter for all.
        keeps_shapes: whether the optimizer has unsharded original parameters, whose states may have any shape.
        owners: by number, the optimizer's parameter: the same flat parameter for all, or a shard for each.
    """

    def __init__(self, wrapper: Wrapper, prefix: str) -> None:
        super().__init__(wrapper, prefix)
        wrapper._mend()
        check_idle(self.unit)
        first = dict(reversed(self.keys))
        self.names = [first[number] for number in range(len(self.shapes))]
        self.is_flat = not self.layout.use_orig_params
        self.keeps_shapes = self.group is None and not self.is_flat
        owned: list[nn.Parameter] = self.layout.local_parameters()
        self.owners = owned * len(self.shapes) if self.is_flat else owned


class ParameterNames:
    """All parameters of a model by their original names.

    Args:
        model: a wrapper, or a module that contains wrappers. Nothing is communicated.

    Attributes:
        units: the units of the wrappers, outer ones first.
        outside: names of parameters that belong to no unit: of plain modules around the wrappers, and ignored ones.
        of: the original names of each parameter that an optimizer may have.
        owners: by original name, the optimizer's parameter.
        current_names: the names of parameters in the wrapped model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units = [
            UnitNames(module, dotted(name))
            for name, module in model.named_modules()
            if isinstance(module, Wrapper) and module._unit is not None
        ]
        self.of: dict[nn.Parameter, list[str]] = {}
        for unit in self.units:
            for owner, name in zip(unit.owners, unit.names, strict=True):
                self.of.setdefault(owner, []).append(name)
        # After a forward with SHARD_GRAD_OP, modules have other objects than the optimizer, so names are compared.
        owned = {key: unit.owners[number] for unit in self.units for number, key in unit.keys}
        current = {name: owned.get(plain_path(name), parameter) for name, parameter in model.named_parameters()}
        self.outside = {parameter: plain_path(name) for name, parameter in current.items() if parameter not in self.of}
        self.of.update({parameter: [name] for parameter, name in self.outside.items()})
        self.owners = {name: owner for owner, names in self.of.items() for name in names}
        self.current_names = {parameter: name for name, parameter in current.items()}
        self._by_name = {**{plain_path(name): parameter for name, parameter in current.items()}, **current}

    def keys(self, optimizer: Any, optim_state_dict: Mapping[str, Any]) -> tuple[dict[Any, nn.Parameter], list[str]]:
        """Maps the keys of the optimizer's own state dict, numbers or names, to parameters. Also returns the problems.

        If there are problems, the map is empty.
        """
        parameters = parameters_of(optimizer.param_groups)
        problems = self.unknown(parameters)
        if problems:
            return {}, problems
        groups = optim_state_dict.get("param_groups")
        keys = list(range(len(parameters))) if groups is None else parameters_of(groups)
        if len(keys) != len(parameters):
            return {}, [detail("own-count", expected=len(parameters), found=len(keys))]
        strangers = [key for key in keys if isinstance(key, str) and key not in self._by_name]
        if strangers:
            return {}, [detail("own-names", strangers=strangers[:5])]
        return {**dict(zip(keys, parameters, strict=True)), **self._by_name}, []

    def behind(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """The original names of parameters of the optimizer."""
        return [name for parameter in parameters for name in self.of[parameter]]

    def unknown(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """Describes the problem if an optimizer has parameters that the model does not have."""
        shapes = [tuple(parameter.shape) for parameter in parameters if parameter not in self.of]
        if not shapes:
            return []
        return [detail("foreign-parameters", number=len(shapes), shapes=shapes[:5])]


# ---- the groups of an optimizer -------------------------------------------------------------------------------------


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The parameters of all groups in order; in a state dict, their keys."""
    return [parameter for group in groups for parameter in group["params"]]


def regrouped(group: Mapping[str, Any], params: list[Any], param_names: Sequence[str] | None) -> dict[str, Any]:
    """A group with copies of the settings of ``group``, for other parameters or keys.

    Args:
        group: of an optimizer or of a state dict.
        params: the parameters or keys of the new group.
        param_names: names to store in the group; ``None`` if the optimizer stores none.
    """
    settings = copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "param_names")})
    if param_names is not None:
        settings["param_names"] = list(param_names)
    return {**settings, "params": params}
