"""Converts between a unit's local shard and the values in a state dict, for the model and for its optimizer.

A rank stores a *local shard* of a unit: a contiguous range of the bucket of all parameters. A state dict contains
parameters, full or in rows. `UnitCodec` converts between both, for weights and for optimizer states alike. Worked
example, a unit ``0`` with ``weight`` (2 x 3) and ``bias`` (3) on two ranks; rank 1 has the local shard ``w b b b .``::

    bucket      all local shards, all-gathered   w w w w w w b b b .
    full        views of the bucket              0.weight 2 x 3, 0.bias 3
    in_form     in the requested form            full on the CPU; or rank 1's rows, 0.weight 1 x 3 and 0.bias 1
    unsharded   full values from a dict          0.weight 2 x 3, 0.bias 3; rows are all-gathered one by one
    copied      into this rank's shard           w b b b .

Only one bucket at a time is unsharded. A local state dict contains the local shard unchanged, as this rank's rows of a
long parameter, which is the bucket.

Keys are the names in the plain module, without the names that wrappers and activation checkpoints add to paths. So a
model with other wrappers, or without any, can load the dict::

    path in the tree    0._fsdp_wrapped_module._checkpoint_wrapped_module.weight
    key                 0.weight

Names are computed on every call, because an activation checkpoint may have been added since the construction. A module
that is in the tree twice is saved twice.

*In torch:* ``_state_dict_utils.py`` converts the model's state, ``_optim_utils.py`` the optimizer's.

Spec: SD-FULL-01, SD-SHARD-01, SD-CFG-18, OSD-01, OSD-03, OSD-06, OSD-08, OSD-09, NAMES-10.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like

from minifsdp.checkpoint import tensors
from minifsdp.checkpoint.state_dict_options import Form, StateDictType
from minifsdp.engine import collectives
from minifsdp.engine.flat_params import FLAT_NAME
from minifsdp.engine.flat_tensor import distributed_tensor, local_values
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import detail
from minifsdp.engine.shards import shard_of
from minifsdp.fsdp1.full_params import check_idle
from minifsdp.fsdp1.wrapper import PREFIX, Wrapper


def plain_path(path: str) -> str:
    """A path without the names that wrappers and activation checkpoints add."""
    return path.replace("_checkpoint_wrapped_module.", "").replace(PREFIX, "")


def dotted(path: str) -> str:
    """The plain prefix of names inside the module at ``path``."""
    return plain_path(path + ".").removeprefix(".")


def rename(state: MutableMapping[str, Any], old: str, new: str) -> None:
    """Replaces the prefix ``old`` by ``new``. Renamed keys keep their order, but move behind all other keys."""
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)


class UnitCodec:
    """The keys of one unit's parameters, and their ranges in the ranks' shards.

    Args:
        wrapper: the wrapper of the unit; it must have one.
        prefix: the prefix of the wrapped module's names in the dict, with a dot, or ``""``.

    Attributes:
        keys: the keys of the parameters, one for each place in the tree, with the parameter's number.
        names: the key of each parameter by number. A tied parameter has its first key, as in ``named_parameters()``.
        local_key: the key of the local shard in a local state dict.
        flat_key: the name of the flat parameter, if there is one; also the key of the shard in local dicts of torch.
        is_flat: whether the optimizer has one flat parameter for all.
        keeps_shapes: whether the optimizer has unsharded original parameters, whose states may have any shape.
        owners: the optimizer's parameter for each number: the same flat parameter for all, or a local shard for each.
        places: the range of each parameter's elements in this rank's shard, by number. A range may be empty.
    """

    def __init__(self, wrapper: Wrapper, prefix: str) -> None:
        unit = wrapper._unit
        assert unit is not None
        self.unit, self.layout, self._wrapper = unit, unit.layout, wrapper
        self.mesh, self.group = unit.plan.mesh, unit.plan.mesh.shard
        self.shapes, self._sharding = [info.shape for info in self.layout.parameters], self.layout.sharding
        self.prefix, self.local_key, self.flat_key = prefix, prefix + "flat_param", prefix + FLAT_NAME
        self.is_flat = not self.layout.use_orig_params
        self.keeps_shapes = self.group is None and not self.is_flat
        self.owners = self.layout.local_parameters() * (len(self.shapes) if self.is_flat else 1)
        self.places = self._sharding.param_ranges(self.mesh.shard_index)
        slots: dict[nn.Module, list[tuple[int, str]]] = {}
        for number, owned in enumerate(self.layout.parameters):
            for slot in owned.attributes:
                slots.setdefault(slot.module, []).append((number, slot.name))
        paths = wrapper.module.named_modules(remove_duplicate=False)
        self.keys = {prefix + dotted(path) + name: n for path, m in paths for n, name in slots.get(m, [])}
        first = {number: key for key, number in reversed(self.keys.items())}
        self.names = [first[number] for number in range(len(self.shapes))]

    def holds(self, number: int, index: int | None = None) -> bool:
        """Whether this rank, or the rank at ``index`` of the shard group, has an element of the parameter."""
        held = self._sharding.range_in_param(self.mesh.shard_index if index is None else index, number)
        return bool(held.stop > held.start)

    # --- from shards to values ---

    def all_gathered(self, values: Mapping[int, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Every parameter's full value on the compute device. All ranks of the shard group must call it.

        Args:
            values: this rank's values by number; the other values of the result are not initialized.
            dtype: the dtype of the values.
        """
        # This rank's shard is filled in place in the bucket, so that the all-gather needs no memory for it.
        bucket = torch.empty(self._sharding.padded_numel, dtype=dtype, device=self.layout.device)
        shard = bucket[self._sharding.shard_range(self.mesh.shard_index)]
        for number, value in values.items():
            place = self.places[number]
            # The state of a flat parameter already has the layout of the local shard.
            shard[place].copy_(value[place] if self.is_flat else value)
        if self.group is not None:
            collectives.all_gather(self.group, bucket, shard).wait()
        return self.layout.views_of(bucket)

    def as_parameter(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """The ``DTensor`` of tensor parallelism of this rank's part of a value, or the value itself."""
        is_part = value.shape == self.layout.local_shapes[number]
        return distributed_tensor(value, self.layout.specs[number] if is_part else None)

    def in_form(self, full: torch.Tensor, form: Form, device: torch.device) -> Any:
        """A copy of a full value in the requested form; on ``device`` unless it is offloaded."""
        device = torch.device("cpu") if form.offload else device
        if not form.is_sharded or self.group is None or not tensors.has_rows(full.shape):
            # Tensor parallelism all-gathers on the compute device, so before the copy to the CPU.
            return (tensors.complete(full) if form.is_complete else full).to(device, copy=True)
        # `ShardedTensor` supports only row-major order.
        full = full.contiguous()
        # Split before the copy to the CPU, so that only this rank's rows are copied.
        by_default = self._wrapper._device_mesh is not None
        if isinstance(full, DTensor) or (by_default if form.use_dtensor is None else form.use_dtensor):
            return tensors.as_dtensor(full, self.group, self._device_mesh, device)
        rows = shard_of(full, 0, self.group.size, self.group.rank).to(device, copy=True)
        return tensors.as_sharded_tensor(rows, full.shape, self.group)

    def rows(self, key: str, value: Any) -> Any:
        """This rank's rows of a full value for the parameter ``key``, on the CPU; an unsuitable value is returned."""
        number = self.keys[key]
        if not isinstance(value, torch.Tensor) or value.shape != self.shapes[number]:
            return value
        full = self.as_parameter(number, self.local_full(number, value))
        return self.in_form(full, Form(StateDictType.SHARDED_STATE_DICT), value.device)

    def local_shard(self, form: Form) -> Any:
        """A copy of this rank's shard for a local state dict."""
        shard = self.layout.local_values().to("cpu" if form.offload else self.layout.device, copy=True)
        size = torch.Size([self._sharding.padded_numel])
        return shard if self.group is None else tensors.as_sharded_tensor(shard, size, self.group)

    @cached_property
    def _device_mesh(self) -> Any:
        if self._wrapper._device_mesh is not None:
            return self._wrapper._device_mesh
        return DeviceMesh.from_group(self.group.process_group, self._wrapper.compute_device.type)  # type: ignore[union-attr]

    # --- from values to shards ---

    def misfit(self, key: str, where: str, value: Any, form: Form, *, any_shape: bool = False) -> Iterator[str]:
        """Describes the problem of a value that a state dict has for the parameter ``key``. Nothing is communicated.

        Args:
            key: one of `keys`.
            where: the name of the value in the message.
            value: the parameter's value, or an optimizer state with a value per element.
            form: the form of the dict.
            any_shape: whether the shape of the value may differ from that of the parameter.
        """
        shape = tuple(self.shapes[self.keys[key]])
        if not is_tensor_like(value):
            yield detail("no-tensor", key=where, type=type(value).__name__)
        elif tuple(value.size()) != shape and not any_shape:
            yield detail("size-mismatch-of-unit", key=where, shape=shape, found=tuple(value.size()))
        elif not tensors.is_sharded_like(value, self.layout.specs[self.keys[key]]):
            yield from tensors.misplaced_rows(value, where, self.group, is_sharded=form.is_sharded)

    def given_shard(self, state: Mapping[str, Any]) -> torch.Tensor | None:
        """This rank's shard in a local state dict, under either of its keys; ``None`` if there is none."""
        given = [state[key] for key in (self.local_key, self.flat_key) if key in state]
        return tensors.on_this_rank(given[0]) if given else None

    def unsharded(self, value: Any) -> torch.Tensor:
        """The full tensor of a value in a state dict. Rows are all-gathered: all ranks of the shard group must call it.

        With tensor parallelism, the result is the tensor that the shard group shares.
        """
        if tensors.local_rows(value) is not None:
            return tensors.gathered_rows(value, self.group, self.layout.device)
        if isinstance(value, torch.Tensor):
            return value
        # Some frameworks use lazy tensors, which read their values from the file in `copy_`.
        return torch.empty(tuple(value.size()), dtype=value.dtype, device="cpu").copy_(value)

    def local_full(self, number: int, value: Any) -> torch.Tensor:
        """`unsharded`, for a value of parameter ``number``. With tensor parallelism, this rank's part of it."""
        spec, local_shape = self.layout.specs[number], self.layout.local_shapes[number]
        return local_values(self.unsharded(value).detach(), spec, local_shape)

    def copy_into(self, shard: torch.Tensor, values: Mapping[int, Any]) -> torch.Tensor:
        """Copies this rank's elements of values, given by number, into ``shard``. Rows are all-gathered one by one."""
        for number, value in values.items():
            elements = self._sharding.flattened(number, self.local_full(number, value))
            held = self._sharding.range_in_param(self.mesh.shard_index, number)
            shard[self.places[number]].copy_(elements[held])
            # Released before the next value is all-gathered.
            del elements
        return shard


class ParameterNames:
    """Maps each parameter of an optimizer to original parameters by name.

    In a wrapped model, the optimizer's parameters are shards: one flat parameter for a whole unit, or one local shard
    of each original parameter. Worked example, the unit of the module's head, on rank 1::

        use_orig_params   the optimizer owns         original names               elements in the local shard
        False             _flat_param, 5 elements    0.weight, 0.bias             0:1, 1:4
        True              weight, 1 element          0.weight                     0:1
                          bias, 3 elements           0.bias                       1:4

    Args:
        model: a wrapper, or a module that contains wrappers. Nothing is communicated.

    Attributes:
        units: the units of the wrappers, outer ones first.
        outside: names of parameters that belong to no unit: of plain modules around the wrappers, and ignored ones.
        of: the original names of each parameter that an optimizer may have.
        owners: by original name, the optimizer's parameter.
        current_names: the names of parameters in the wrapped model.
        by_name: parameters by both kinds of names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units: list[UnitCodec] = []
        self.of: dict[nn.Parameter, list[str]] = {}
        for path, wrapper in model.named_modules():
            if isinstance(wrapper, Wrapper) and wrapper._unit is not None:
                wrapper._recover_after_error()
                check_idle(wrapper._unit)
                unit = UnitCodec(wrapper, dotted(path))
                self.units.append(unit)
                for owner, name in zip(unit.owners, unit.names, strict=True):
                    self.of.setdefault(owner, []).append(name)
        # After a forward with SHARD_GRAD_OP, modules have other tensors than the optimizer, so names are compared.
        owned = {key: unit.owners[number] for unit in self.units for key, number in unit.keys.items()}
        current = {name: owned.get(plain_path(name), parameter) for name, parameter in model.named_parameters()}
        self.outside = {parameter: plain_path(name) for name, parameter in current.items() if parameter not in self.of}
        self.of.update({parameter: [name] for parameter, name in self.outside.items()})
        self.owners = {name: owner for owner, names in self.of.items() for name in names}
        self.current_names = {parameter: name for name, parameter in current.items()}
        self.by_name = {**{plain_path(name): parameter for name, parameter in current.items()}, **current}

    def originals_of(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """The original names of parameters of the optimizer."""
        return [name for parameter in parameters for name in self.of[parameter]]

    def unknown(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """Describes the problem if an optimizer has parameters that the model does not have."""
        shapes = [tuple(parameter.shape) for parameter in parameters if parameter not in self.of]
        return [detail("foreign-parameters", number=len(shapes), shapes=shapes[:5])] if shapes else []


def tensor_parallel_groups(units: Iterable[UnitCodec]) -> list[Group]:
    """The groups of tensor parallelism of units. Together with the groups of FSDP, they contain all ranks."""
    meshes = dict.fromkeys(spec.mesh for unit in units for spec in unit.layout.specs if spec is not None)
    return [Group.of(mesh.get_group(axis)) for mesh in meshes for axis in range(mesh.ndim)]


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The parameters of all groups in order; for groups of a state dict, the keys of the parameters."""
    return [parameter for group in groups for parameter in group["params"]]


def regrouped(group: Mapping[str, Any], params: list[Any], param_names: Sequence[str] | None) -> dict[str, Any]:
    """A group with copies of the settings of ``group``, for other parameters or keys.

    Args:
        group: a group of an optimizer or of a state dict.
        params: the parameters or keys of the new group.
        param_names: names to store in the group; ``None`` if the optimizer stores none.
    """
    settings = copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "param_names")})
    if param_names is not None:
        settings["param_names"] = list(param_names)
    return {**settings, "params": params}
