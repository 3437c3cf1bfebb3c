"""Which original parameters stand behind a parameter of the optimizer, and where their elements lie.

An optimizer knows parameters as objects, and in its state dict as numbers. What it steps on in a wrapped model is a
slice: one flat parameter for a whole unit, or one slice for each original parameter. What a checkpoint must speak of
are the original parameters, by name. `ParameterNames` knows both sides.

Worked example, a unit ``0`` with ``weight`` (2 x 3) and ``bias`` (3) on two ranks; rank 1 has the piece ``w b b b .``::

    use_orig_params   the optimizer of rank 1 owns      names behind it              elements in rank 1's piece
    False             _flat_param, 5 elements           0.weight, 0.bias             0:1, 1:4
    True              weight, 1 element                 0.weight                     0:1
                      bias, 3 elements                  0.bias                       1:4

Both are one table: *owner -> numbers of the unit's parameters*, and for each number its place in the piece. So the
rooms that write and read need not ask which of the two it is: they put together a piece, or take one apart.

A shared parameter has the name under which it is found first, as in ``named_parameters()``.

*In torch:* ``_get_param_to_fqns``, ``_get_flat_param_to_fqn``, ``_get_fqn_to_fsdp_param_info`` and
``_get_param_key_to_param``, four walks over the tree for as many dicts.

Spec: OSD-03, OSD-08, OSD-09.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from minifsdp.checkpoint.codec import UnitCodec
from minifsdp.checkpoint.names import dotted, plain_path
from minifsdp.engine.messages import detail
from minifsdp.fsdp1.full_params import check_idle
from minifsdp.fsdp1.wrapper import Wrapper


class UnitNames(UnitCodec):
    """One unit: its parameters' names, and what the optimizer owns of it.

    Args:
        wrapper: whose unit.
        prefix: the wrapper's plain name in the model, with a dot, or ``""``.

    Attributes:
        names: by number, the plain name under which each parameter is found first.
        owners: what the optimizer owns, with the numbers of the parameters behind each.
    """

    def __init__(self, wrapper: Wrapper, prefix: str) -> None:
        super().__init__(wrapper, prefix)
        wrapper._mend()
        check_idle(self.unit)
        first = dict(reversed(self.keys))
        self.names = [first[number] for number in range(len(self.shapes))]
        owned = self.layout.local_parameters()
        self.is_flat = self.layout.hides_originals
        numbers = [list(range(len(self.shapes)))] if self.is_flat else [[number] for number in range(len(owned))]
        self.owners: list[tuple[nn.Parameter, list[int]]] = list(zip(owned, numbers, strict=True))

    @property
    def keeps_shapes(self) -> bool:
        """Whether the optimizer steps on whole parameters in their own shapes, so that states may have any shape."""
        return self.group is None and not self.is_flat


class ParameterNames:
    """All parameters of a model by their original names.

    Args:
        model: a module with wrappers in it, or one itself. Nothing is communicated.

    Attributes:
        units: those of the wrappers, outer ones first.
        of: for each parameter that an optimizer may own the original names behind it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units = [
            UnitNames(module, dotted(name))
            for name, module in model.named_modules()
            if isinstance(module, Wrapper) and module._unit is not None
        ]
        self.of: dict[nn.Parameter, list[str]] = {
            owner: [unit.names[number] for number in numbers] for unit in self.units for owner, numbers in unit.owners
        }
        self._by_current_name: dict[str, nn.Parameter] = {}
        in_units = {key for unit in self.units for _, key in unit.keys}
        for name, parameter in model.named_parameters():
            # After a forward of SHARD_GRAD_OP modules show other objects than the optimizer owns: go by the names.
            if parameter not in self.of and plain_path(name) not in in_units:
                self.of[parameter] = [plain_path(name)]
            self._by_current_name[name] = parameter
        self.current_names = {parameter: name for name, parameter in reversed(self._by_current_name.items())}
        for name, parameter in list(self._by_current_name.items()):
            self._by_current_name.setdefault(plain_path(name), parameter)

    @cached_property
    def every_name(self) -> set[str]:
        """The names of all parameters."""
        return {name for names in self.of.values() for name in names}

    @cached_property
    def outside(self) -> dict[nn.Parameter, str]:
        """Parameters that belong to no unit: of plain modules around the wrappers, and ignored ones."""
        owned = {owner for unit in self.units for owner, _ in unit.owners}
        return {parameter: names[0] for parameter, names in self.of.items() if parameter not in owned}

    def keys(self, optimizer: Any, optim_state_dict: Mapping[str, Any]) -> tuple[dict[Any, nn.Parameter], list[str]]:
        """From the keys of the optimizer's own state dict, numbers or names, to parameters; and what is wrong there.

        Where something is wrong the keys are left out.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        problems = self.unknown(parameters)
        if problems:
            return {}, problems
        groups = optim_state_dict.get("param_groups")
        if groups is None and any(isinstance(key, str) for key in optim_state_dict["state"]):
            keys = [key for key in optim_state_dict["state"] if key in self._by_current_name]
        else:
            keys = list(range(len(parameters))) if groups is None else [key for g in groups for key in g["params"]]
            if len(keys) != len(parameters):
                return {}, [detail("own-count", expected=len(parameters), found=len(keys))]
        strangers = [key for key in keys if isinstance(key, str) and key not in self._by_current_name]
        if strangers:
            return {}, [detail("own-names", strangers=strangers[:5])]
        return {
            key: self._by_current_name[key] if isinstance(key, str) else parameters[position]
            for position, key in enumerate(keys)
        }, []

    def unknown(self, parameters: list[nn.Parameter]) -> list[str]:
        """What is wrong with an optimizer that has parameters which the model has not, in words."""
        shapes = [tuple(parameter.shape) for parameter in parameters if parameter not in self.of]
        if not shapes:
            return []
        return [detail("foreign-parameters", number=len(shapes), shapes=shapes[:5])]
