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

The optimizer's states have *facts*, which ranks can compare and send without sending the states. A tensor with the
parameter's own shape has a value *per element* and is sharded like the parameter. Its fact is its dtype. Any other
state, such as Adam's ``step``, a number or ``None``, applies to the *whole* parameter. Its fact is its value. Worked
example, Adam after one step, the states of one parameter and their facts::

    states    {"step": tensor(1.), "exp_avg": 2 x 3}
    facts     {"step": Number(torch.float32, 1.0), "exp_avg": PerElement(torch.float32)}

Names are computed on every call, because an activation checkpoint may have been added since the construction. A module
that is in the tree twice is saved twice.

*In torch:* ``_state_dict_utils.py`` converts the model's state, ``_optim_utils.py`` the optimizer's. Its facts are
``_ParamAllGather`` and similar records.

Spec: SD-FULL-01, SD-SHARD-01, SD-CFG-18, OSD-01, OSD-03, OSD-06, OSD-08, OSD-09, NAMES-10.
"""

import copy
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from minifsdp.checkpoint import tensors
from minifsdp.checkpoint.state_dict_options import Form, StateDictType
from minifsdp.engine import collectives
from minifsdp.engine.flat_params import FLAT_NAME
from minifsdp.engine.flat_tensor import distributed_tensor, local_values
from minifsdp.engine.mesh import Group
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
        clean: a function that removes other parts from keys.

    Attributes:
        keys: the keys of the parameters, one for each place in the tree, with the parameter's number.
        shapes: the shapes of the parameters by key.
        owners: the optimizer's parameter for each key: the same flat parameter for all, or a local shard for each.
        names: the key of each parameter, by number. A tied parameter has its first key, as in ``named_parameters()``.
        local_key: the key of the local shard in a local state dict.
        flat_key: the name of the flat parameter, if there is one; also the key of the shard in local dicts of torch.
        is_flat: whether the optimizer has one flat parameter for all.
        keeps_shapes: whether the optimizer has unsharded original parameters, whose states may have any shape.
        places: the range of each parameter's elements in this rank's shard, by number. A range may be empty.
    """

    def __init__(
        self, wrapper: Wrapper, prefix: str, clean: Callable[[str], str] = str
    ) -> None:
        assert wrapper._unit is not None
        self.unit = wrapper._unit
        self.layout = self.unit.layout
        self.mesh = self.unit.plans[0].mesh
        self.group = self.mesh.shard
        self.prefix = prefix
        self.local_key = prefix + "flat_param"
        self.flat_key = prefix + FLAT_NAME
        self.is_flat = not self.layout.use_orig_params
        self.keeps_shapes = self.group is None and not self.is_flat
        self._wrapper = wrapper
        self._sharding = self.layout.sharding
        self.places = self._sharding.param_ranges(self.mesh.shard_index)
        slots: dict[nn.Module, list[tuple[int, str]]] = {}
        for number, info in enumerate(self.layout.param_infos):
            for slot in info.places:
                slots.setdefault(slot.module, []).append((number, slot.name))
        paths = wrapper.module.named_modules(remove_duplicate=False)
        self.keys = {
            clean(prefix + dotted(path) + name): n
            for path, m in paths
            for n, name in slots.get(m, [])
        }
        self.shapes = {
            key: self.layout.param_infos[number].shape
            for key, number in self.keys.items()
        }
        owners = self.layout.local_parameters
        self.owners = {
            key: owners[0 if self.is_flat else number]
            for key, number in self.keys.items()
        }
        first = {number: key for key, number in reversed(self.keys.items())}
        self.names = [first[number] for number in sorted(first)]

    def holds(self, key: str, index: int | None = None) -> bool:
        """Whether this rank, or the rank at ``index`` of the shard group, has an element of the parameter."""
        held = self._sharding.range_in_param(
            self.mesh.shard_index if index is None else index, self.keys[key]
        )
        return bool(held.stop > held.start)

    # --- from shards to values ---

    def all_gathered(
        self, values: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Every parameter's full value, by number, on the compute device. All ranks of the shard group must call it.

        Args:
            values: this rank's values by key; the other values of the result are not initialized.
            dtype: the dtype of the values.
        """
        # This rank's shard is filled in place in the bucket, so that the all-gather needs no memory for it.
        bucket = torch.empty(
            self._sharding.padded_numel, dtype=dtype, device=self.layout.device
        )
        shard = bucket[self._sharding.shard_range(self.mesh.shard_index)]
        for key, value in values.items():
            place = self.places[self.keys[key]]
            # The state of a flat parameter already has the layout of the local shard.
            shard[place].copy_(value[place] if self.is_flat else value)
        if self.group is not None:
            collectives.all_gather(self.group, bucket, shard).wait()
        return self.layout.views_of(bucket)

    def as_parameter(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """The ``DTensor`` of tensor parallelism of this rank's part of a value, or the value itself."""
        number = self.keys[key]
        is_part = value.shape == self.layout.local_shapes[number]
        return distributed_tensor(value, self.layout.specs[number] if is_part else None)

    def in_form(self, full: torch.Tensor, form: Form, device: torch.device) -> Any:
        """A copy of a full value in the requested form; on ``device`` unless it is offloaded."""
        device = torch.device("cpu") if form.offload else device
        if (
            not form.is_sharded
            or self.group is None
            or not tensors.has_rows(full.shape)
        ):
            # Tensor parallelism all-gathers on the compute device, so before the copy to the CPU.
            return (tensors.complete(full) if form.is_complete else full).to(
                device, copy=True
            )
        # `ShardedTensor` supports only row-major order.
        full = full.contiguous()
        # Split before the copy to the CPU, so that only this rank's rows are copied.
        use_dtensor = (
            self._wrapper._device_mesh is not None
            if form.use_dtensor is None
            else form.use_dtensor
        )
        if use_dtensor or isinstance(full, DTensor):
            return tensors.as_dtensor(full, self.group, self._device_mesh, device)
        rows = shard_of(full, 0, self.group.size, self.group.rank).to(device, copy=True)
        return tensors.as_sharded_tensor(rows, full.shape, self.group)

    def rows(self, key: str, value: Any) -> Any:
        """This rank's rows of a full value for the parameter ``key``, on the CPU; an unsuitable value is returned."""
        if not isinstance(value, torch.Tensor) or value.shape != self.shapes[key]:
            return value
        full = self.as_parameter(key, self.local_full(key, value))
        return self.in_form(full, Form(StateDictType.SHARDED_STATE_DICT), value.device)

    def local_shard(self, form: Form) -> Any:
        """A copy of this rank's shard for a local state dict."""
        shard = self.layout.local_values().to(
            "cpu" if form.offload else self.layout.device, copy=True
        )
        if self.group is None:
            return shard
        return tensors.as_sharded_tensor(
            shard, torch.Size([self._sharding.padded_numel]), self.group
        )

    @cached_property
    def _device_mesh(self) -> Any:
        if self._wrapper._device_mesh is not None:
            return self._wrapper._device_mesh
        kind = self._wrapper.compute_device.type
        group: Any = self.group
        return DeviceMesh.from_group(group.process_group, kind)

    # --- from values to shards ---

    def given_shard(self, state: Mapping[str, Any]) -> torch.Tensor | None:
        """This rank's shard in a local state dict, under either of its keys; ``None`` if there is none."""
        given = [state[key] for key in (self.local_key, self.flat_key) if key in state]
        return tensors.on_this_rank(given[0]) if given else None

    def unsharded(self, value: Any) -> torch.Tensor:
        """The full tensor of a value in a state dict. Rows are all-gathered: all ranks of the shard group must call it.

        With tensor parallelism, the result is the tensor that the shard group shares.
        """
        if tensors.is_sharded(value):
            return tensors.gathered_rows(value, self.group, self.layout.device)
        if isinstance(value, torch.Tensor):
            return value
        # Some frameworks use lazy tensors, which read their values from the file in `copy_`.
        return torch.empty(tuple(value.size()), dtype=value.dtype, device="cpu").copy_(
            value
        )

    def local_full(self, key: str, value: Any) -> torch.Tensor:
        """`unsharded`, for a value of the parameter ``key``. With tensor parallelism, this rank's part of it."""
        number = self.keys[key]
        full = self.unsharded(value).detach()
        return local_values(
            full, self.layout.specs[number], self.layout.local_shapes[number]
        )

    def copy_into(self, shard: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
        """Copies this rank's elements of values, given by key, into ``shard``. Rows are all-gathered one by one."""
        for key, value in values.items():
            number = self.keys[key]
            held = self._sharding.range_in_param(self.mesh.shard_index, number)
            # The full value has no name, so it is released before the next value is all-gathered.
            shard[self.places[number]].copy_(
                self._sharding.flattened(number, self.local_full(key, value))[held]
            )
        return shard


class NamedOptimizer:
    """An optimizer of a model with units, the original names of its parameters, and the form of its state.

    In a wrapped model, the optimizer's parameters are shards: one flat parameter for a whole unit, or one local shard
    of each original parameter. Worked example, the unit of the module's head, on rank 1::

        use_orig_params   the optimizer owns         original names               elements in the local shard
        False             _flat_param, 5 elements    0.weight, 0.bias             0:1, 1:4
        True              weight, 1 element          0.weight                     0:1
                          bias, 3 elements           0.bias                       1:4

    Args:
        model: a wrapper, or a module that contains wrappers. Nothing is communicated.
        optim: an optimizer of the model's parameters, created after wrapping.
        form: the form of the state; with ``form.first_only`` only the first rank gets or provides it.
        by_name: whether the optimizer keys its state by the names that parameters have in the wrapped model.
        is_lenient: accept a dict that lacks parameters outside of all units.
        clean: a function that removes other parts from original names.

    Attributes:
        model, optim, form, by_name, is_lenient: as given.
        units: the units of the wrappers, outer ones first.
        unit_of: by original name, the unit.
        outside: names of parameters that belong to no unit: of plain modules around the wrappers, and ignored ones.
        of: the original names of each parameter that an optimizer may have.
        owners: by original name, the optimizer's parameter.
        named: parameters by original names and by the names in the wrapped model.
        keys: the keys of the parameters in the optimizer's own state dict: numbers, counted over its groups, or names.
        tensor_parallel: the groups of tensor parallelism, if ``form.is_complete``. Together with the groups of FSDP,
            they contain all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Any,
        form: Form,
        *,
        by_name: bool = False,
        is_lenient: bool = False,
        clean: Callable[[str], str] = str,
    ) -> None:
        self.model = model
        self.optim = optim
        self.form = form
        self.by_name = by_name
        self.is_lenient = is_lenient
        self.units: list[UnitCodec] = []
        for path, wrapper in model.named_modules():
            if isinstance(wrapper, Wrapper) and wrapper._unit is not None:
                wrapper._recover_after_error()
                check_idle(wrapper._unit)
                self.units.append(UnitCodec(wrapper, dotted(path), clean))
        self.unit_of = {name: unit for unit in self.units for name in unit.names}
        # After a forward with SHARD_GRAD_OP, modules have other tensors than the optimizer, so names are compared.
        of_units = {
            key: owner for unit in self.units for key, owner in unit.owners.items()
        }
        registered = dict(model.named_parameters())
        plain = {name: clean(plain_path(name)) for name in registered}
        current = {
            name: of_units.get(plain[name], parameter)
            for name, parameter in registered.items()
        }
        in_units = set(of_units.values())
        self.outside = {
            parameter: plain[name]
            for name, parameter in current.items()
            if parameter not in in_units
        }
        self.owners = {
            **{name: of_units[name] for name in self.unit_of},
            **{name: parameter for parameter, name in self.outside.items()},
        }
        self.of: dict[nn.Parameter, list[str]] = {}
        for name, owner in self.owners.items():
            self.of.setdefault(owner, []).append(name)
        self.named = {
            **{plain[name]: parameter for name, parameter in current.items()},
            **current,
        }
        names = {p: name for name, p in current.items()} if by_name else {}
        numbered = enumerate(parameters_of(optim.param_groups))
        self.keys = {
            parameter: names.get(parameter, number) for number, parameter in numbered
        }
        self.tensor_parallel = (
            tensor_parallel_groups(self.units) if form.is_complete else []
        )

    def originals_of(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """The original names of parameters of the optimizer."""
        return [name for parameter in parameters for name in self.of[parameter]]


def tensor_parallel_groups(units: Iterable[UnitCodec]) -> list[Group]:
    """The groups of tensor parallelism of units. Together with the groups of FSDP, they contain all ranks."""
    meshes = dict.fromkeys(
        spec.mesh for unit in units for spec in unit.layout.specs if spec is not None
    )
    return [
        Group.of(mesh.get_group(axis)) for mesh in meshes for axis in range(mesh.ndim)
    ]


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The parameters of all groups in order; for groups of a state dict, the keys of the parameters."""
    return [parameter for group in groups for parameter in group["params"]]


def regrouped(
    group: Mapping[str, Any], params: list[Any], param_names: Sequence[str] | None
) -> dict[str, Any]:
    """A group with copies of the settings of ``group``, for other parameters or keys.

    Args:
        group: a group of an optimizer or of a state dict.
        params: the parameters or keys of the new group.
        param_names: names to store in the group; ``None`` if the optimizer stores none.
    """
    settings = copy.deepcopy(
        {
            key: value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
    )
    if param_names is not None:
        settings["param_names"] = list(param_names)
    return {**settings, "params": params}


# ---- facts about the optimizer's states ------------------------------------------------------------------------------

# By name of the parameter and name of the state, its fact or its converted value.
Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class PerElement:
    """A state with one value per element of the parameter. Other ranks only need its dtype.

    Attributes:
        shape: a shape that is not the parameter's. Such a tensor cannot be sharded, so only unsharded parameters may
            have one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, repr=False)
class Number:
    """A state that is a 0-d tensor: one value for the whole parameter."""

    dtype: torch.dtype
    value: Any

    def __repr__(self) -> str:
        return f"{self.value} ({self.dtype})"


def facts_of(
    entries: Mapping[str, Any], shape: torch.Size, elementwise: Container[str]
) -> dict[str, Any]:
    """The facts of one parameter by name of the state.

    Args:
        entries: the states.
        shape: the shape of the parameter.
        elementwise: names of states that are per element if both the state and the parameter are 0-d.
    """
    facts: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            facts[key] = value
        elif value.ndim == 0 and (shape or key not in elementwise):
            facts[key] = Number(value.dtype, value.item())
        else:
            facts[key] = PerElement(
                value.dtype, None if value.size() == shape else tuple(value.size())
            )
    return facts


def copied(value: Any, *, offload: bool = False) -> Any:
    """A copy of a value in its own memory, because an optimizer increments its step counter in place."""
    if isinstance(value, Number):
        return torch.tensor(value.value, dtype=value.dtype, device="cpu")
    if isinstance(value, torch.Tensor):
        return value.to("cpu" if offload else value.device, copy=True)
    # Also copies lists of tensors: some optimizers keep a history.
    return copy.deepcopy(value)


def facts_given(target: NamedOptimizer, state: Mapping[str, Any]) -> Facts:
    """The facts of a dict about parameters in units. Nothing is communicated."""
    found = [(key, tensor) for _, key, tensor in tensors_in(state, target)]
    # A 0-d value for a 0-d parameter is ambiguous. A state that has dimensions for any parameter is per element. If all
    # parameters are 0-d, all states except the step counter are per element.
    elementwise = {key for key, tensor in found if tensor.ndim} or {
        key for key, _ in found if key != "step"
    }
    return {
        name: facts_of(state[name], unit.shapes[name], elementwise)
        for name, unit in target.unit_of.items()
        if name in state
    }


def tensors_in(
    state: Mapping[str, Any], target: NamedOptimizer
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """All tensors in a dict's parameter states, with the names of the parameter and the state."""
    for name in target.owners:
        for key, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                yield name, key, value
