"""Converts between a unit's local shard and the values in a state dict, for the model and for its optimizer.

A rank stores a *local shard* of a unit: a contiguous range of the bucket of all parameters. A state dict contains
parameters, full or in rows. `UnitCodec` converts between both, for weights and for optimizer states alike. Worked
example, a unit ``0`` with ``weight`` (2 x 3) and ``bias`` (3) on two ranks; rank 1 has the local shard ``w b b b .``::

    row        all shards, all-gathered    w w w w w w b b b .
    full       views of the bucket         0.weight 2 x 3, 0.bias 3
    formed     in the requested form       full on the CPU; or rank 1's rows, 0.weight 1 x 3 and 0.bias 1
    whole      full values from a dict     0.weight 2 x 3, 0.bias 3; rows are all-gathered, one parameter at a time
    laid       in this rank's shard        w b b b .

Only one bucket at a time is unsharded. A local state dict contains the local shard unchanged: it is this rank's rows of
one long parameter, the bucket itself.

*In torch:* ``_state_dict_utils.py`` does this for the model's state, ``_optim_utils.py`` for the optimizer's.

Spec: SD-FULL-01, SD-SHARD-01, SD-CFG-18, OSD-01, OSD-06.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import is_tensor_like

from minifsdp.checkpoint import chunks
from minifsdp.checkpoint.names import names_in_state
from minifsdp.checkpoint.state_dict_options import OptimStateDictConfig, StateDictConfig, StateDictType
from minifsdp.engine import collectives
from minifsdp.engine.flat_params import FLAT_NAME
from minifsdp.engine.flat_tensor import local_values
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.messages import detail
from minifsdp.fsdp1.wrapper import Wrapper


@dataclass(frozen=True)
class Form:
    """The form in which values are saved or loaded.

    Attributes:
        type: full values, this rank's rows, or the local shard.
        offload: values are moved to the CPU; otherwise they stay on their device.
        first_only: only the first rank gets the result, or provides the dict to load.
        use_dtensor: rows are wrapped as ``DTensor`` also if the wrapper was not given a mesh; otherwise as
            ``ShardedTensor``.
    """

    type: StateDictType = StateDictType.FULL_STATE_DICT
    offload: bool = True
    first_only: bool = False
    use_dtensor: bool = False

    @classmethod
    def of(cls, type: StateDictType | None, config: StateDictConfig | OptimStateDictConfig | None) -> Form:
        """The form for a model's settings; a model without units has no settings and gets the full form."""
        if type is None or config is None:
            return cls()
        return cls(type, config.offload_to_cpu, getattr(config, "rank0_only", False), config.use_dtensor)

    @property
    def is_sharded(self) -> bool:
        """Whether values are rows."""
        return self.type is StateDictType.SHARDED_STATE_DICT

    @property
    def is_local(self) -> bool:
        """Whether the value is the unit's local shard."""
        return self.type is StateDictType.LOCAL_STATE_DICT


class UnitCodec:
    """The keys of one unit's parameters, and their ranges in the ranks' shards.

    Args:
        wrapper: the wrapper of the unit; it must have one.
        prefix: the prefix of the wrapped module's names in the dict, with a dot, or ``""``.

    Attributes:
        keys: number and key of each parameter, once for each place in the tree.
        local_key: the key of the local shard in a local state dict.
        flat_key: the name of the flat parameter, if there is one; also the key of the shard in local dicts of torch.
    """

    def __init__(self, wrapper: Wrapper, prefix: str) -> None:
        unit = wrapper._unit
        assert unit is not None
        self.unit, self.layout, self._wrapper = unit, unit.layout, wrapper
        self.mesh: MeshGroups = unit.plan.mesh
        self.group: Group | None = self.mesh.shard
        self.shapes, self._sharding = self.layout.shapes, self.layout.sharding
        self.keys = [(number, prefix + name) for number, name in names_in_state(unit, wrapper.module)]
        self.prefix, self.local_key, self.flat_key = prefix, prefix + "flat_param", prefix + FLAT_NAME

    # --- ranges of a parameter's elements ---

    @cached_property
    def places(self) -> list[slice]:
        """By number, the range of the parameter's elements in this rank's shard; may be empty."""
        return self._sharding.param_ranges(self.mesh.shard_index)

    def is_here(self, number: int) -> bool:
        """Whether this rank has an element of the parameter."""
        return bool(self.places[number].stop > self.places[number].start)

    def has_part(self, index: int, number: int) -> bool:
        """Whether the rank at position ``index`` of the shard group has an element of the parameter."""
        part = self._sharding.range_in_param(index, number)
        return bool(part.stop > part.start)

    # --- from shards to values ---

    def empty_row(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """An uninitialized bucket on the compute device, and this rank's shard as a view of it, filled with zeros."""
        row = torch.empty(self._sharding.padded_numel, dtype=dtype, device=self.layout.device)
        local_shard = row[self._sharding.shard_range(self.mesh.shard_index)]
        return row, local_shard.zero_()

    def all_gather(self, row: torch.Tensor, local_shard: torch.Tensor) -> list[torch.Tensor]:
        """All-gathers the shards of all ranks into a bucket. All ranks of the shard group must call it.

        Args:
            row: the bucket, from `empty_row`.
            local_shard: this rank's shard; it may be a view of the bucket.

        Returns:
            The parameters as views of the bucket, in their shapes.
        """
        if self.group is None:
            row.copy_(local_shard)
        else:
            collectives.all_gather(self.group, row, local_shard.to(row.device)).wait()
        return self.layout.views_of(row)

    def formed(self, full: torch.Tensor, form: Form, device: torch.device) -> Any:
        """A copy of a full value in the requested form; on ``device`` unless it is offloaded."""
        device = torch.device("cpu") if form.offload else device
        if not form.is_sharded or self.group is None or not chunks.is_cut(full.shape):
            return full.to(device, copy=True)
        # Split before the copy to the CPU, so that only this rank's rows are copied.
        # If the wrapper was given a mesh, values are DTensors by default.
        if self._wrapper.device_mesh is not None or form.use_dtensor:
            return chunks.as_dtensor(full, self.group, self._device_mesh, device)
        return chunks.as_sharded_tensor(chunks.rows_of(full, self.group).to(device, copy=True), full.shape, self.group)

    def local_shard(self, form: Form) -> Any:
        """A copy of this rank's shard for a local state dict."""
        local_shard = self.layout.local_values().to("cpu" if form.offload else self.layout.device, copy=True)
        row = torch.Size([self._sharding.padded_numel])
        return local_shard if self.group is None else chunks.as_sharded_tensor(local_shard, row, self.group)

    @cached_property
    def _device_mesh(self) -> Any:
        group, given = self.group, self._wrapper.device_mesh
        if given is not None or group is None:
            return given
        return DeviceMesh.from_group(group.process_group, self._wrapper.compute_device.type)

    # --- from values to shards ---

    def misfit(self, number: int, key: str, value: Any, form: Form, *, any_shape: bool = False) -> Iterator[str]:
        """Describes the problem of a value that a state dict has for a parameter. Nothing is communicated."""
        shape = tuple(self.shapes[number])
        is_rows = chunks.local_rows(value) is not None
        if not is_tensor_like(value):
            yield detail("no-tensor", key=key, type=type(value).__name__)
        elif is_rows and not form.is_sharded:
            yield detail("full-expected", where=key, type=type(value).__name__)
        elif tuple(value.size()) != shape and not any_shape:
            yield detail("size-mismatch-of-unit", key=key, shape=shape, found=tuple(value.size()))
        elif is_rows and tuple(value.size()) == shape:
            yield from chunks.misplaced_rows(value, key, self.group)

    def given_local_shard(self, state: Mapping[str, Any]) -> torch.Tensor | None:
        """This rank's shard in a local state dict, under either of its keys; ``None`` if there is none."""
        given = [state[key] for key in (self.local_key, self.flat_key) if key in state]
        return chunks.on_this_rank(given[0]) if given else None

    def whole(self, value: Any) -> torch.Tensor:
        """The full tensor of a value in a state dict. Rows are all-gathered: all ranks of the shard group must call it.

        With tensor parallelism it is the part that the shard group has together.
        """
        if chunks.local_rows(value) is not None:
            return chunks.gathered_rows(value, self.group, self.layout.device)
        if isinstance(value, torch.Tensor):
            return value
        # A lazy tensor of a framework that reads files late provides its values in `copy_`.
        return torch.empty(tuple(value.size()), dtype=value.dtype).copy_(value)

    def lay(self, full: torch.Tensor, number: int, local_shard: torch.Tensor) -> None:
        """Copies this rank's elements of a full parameter to their range in ``local_shard``, without communication."""
        elements = local_values(full.detach(), self.layout.specs[number], self.layout.local_shapes[number])
        part = self._sharding.range_in_param(self.mesh.shard_index, number)
        local_shard[self.places[number]].copy_(elements.reshape(-1)[part])
