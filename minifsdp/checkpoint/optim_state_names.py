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

Names are looked up when they are asked for and not remembered from construction, since an activation checkpoint may
have been put around a module since. A shared parameter has the name under which it is found first, as in
``named_parameters()``.

*In torch:* ``_get_param_to_fqns``, ``_get_flat_param_to_fqn``, ``_get_fqn_to_fsdp_param_info`` and
``_get_param_key_to_param``, four walks over the tree for as many dicts.

Spec: OSD-03, OSD-08, OSD-09.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from minifsdp.checkpoint.state_dict import dotted, names_in_state, plain_path
from minifsdp.engine import collectives
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.messages import detail
from minifsdp.fsdp1.base import WrapperBase
from minifsdp.fsdp1.full_params import check_idle


class UnitNames:
    """One unit: its parameters' names, and where each lies in the pieces of the ranks.

    Args:
        wrapper: whose unit.
        prefix: the wrapper's plain name in the model, with a dot, or ``""``.

    Attributes:
        names: by number, the plain name under which each parameter is found first.
        owners: what the optimizer owns, with the numbers of the parameters behind each.
    """

    def __init__(self, wrapper: WrapperBase, prefix: str) -> None:
        unit = wrapper._unit
        assert unit is not None
        wrapper._mend()
        check_idle(unit)
        self.wrapper, self.layout = wrapper, unit.layout
        self.mesh: Mesh = unit.plan.mesh
        self.group: Group | None = self.mesh.shard
        self.shapes, self._partition = self.layout.shapes, self.layout.partition
        first: dict[int, str] = {}
        self.every_name: list[str] = []
        for number, name in names_in_state(unit, wrapper.module):
            first.setdefault(number, prefix + name)
            self.every_name.append(prefix + name)
        self.names = [first[number] for number in range(len(self.shapes))]
        owned = self.layout.local_parameters()
        self.is_flat = self.layout.hides_originals
        numbers = [list(range(len(self.shapes)))] if self.is_flat else [[number] for number in range(len(owned))]
        self.owners: list[tuple[nn.Parameter, list[int]]] = list(zip(owned, numbers, strict=True))

    @property
    def keeps_shapes(self) -> bool:
        """Whether the optimizer steps on whole parameters in their own shapes, so that states may have any shape."""
        return self.group is None and not self.is_flat

    @cached_property
    def places(self) -> list[slice]:
        """By number, where the parameter's elements lie in this rank's piece; may be empty."""
        return self._partition.slices_of_piece(self.mesh.shard_index)

    def is_here(self, number: int) -> bool:
        """Whether this rank has an element of the parameter."""
        return bool(self.places[number].stop > self.places[number].start)

    def has_part(self, index: int, number: int) -> bool:
        """Whether the rank at position ``index`` of the shard group has an element of the parameter."""
        part = self._partition.part_in_parameter(index, number)
        return bool(part.stop > part.start)

    def part_of(self, full: torch.Tensor, number: int) -> torch.Tensor:
        """This rank's elements of a parameter's full tensor, 1-D."""
        return full.reshape(-1)[self._partition.part_in_parameter(self.mesh.shard_index, number)]

    def empty_piece(self, dtype: torch.dtype) -> torch.Tensor:
        """A piece of zeros, where the shard is."""
        device = self.layout.local_values().device
        return torch.zeros(self._partition.shard_numel, dtype=dtype, device=device)

    def empty_row(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole row on the compute device, and in it this rank's piece, which is zeros."""
        row = torch.empty(self._partition.padded_numel, dtype=dtype, device=self.layout.device)
        piece = row[self._partition.piece(self.mesh.shard_index)]
        return row, piece.zero_()

    def gather(self, row: torch.Tensor, piece: torch.Tensor) -> None:
        """Fills a row with the pieces of all ranks. All ranks of the shard group must call it.

        Args:
            row: from `empty_row`.
            piece: this rank's; it may be its place in the row.
        """
        if self.group is None:
            row.copy_(piece)
        else:
            collectives.gather(self.group, row, piece.to(row.device)).wait()

    def views_of(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' parts of a row, in their shapes."""
        return self.layout.views_of(row)


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
            if isinstance(module, WrapperBase) and module._unit is not None
        ]
        self.of: dict[nn.Parameter, list[str]] = {
            owner: [unit.names[number] for number in numbers] for unit in self.units for owner, numbers in unit.owners
        }
        self._by_current_name: dict[str, nn.Parameter] = {}
        in_units = {name for unit in self.units for name in unit.every_name}
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
