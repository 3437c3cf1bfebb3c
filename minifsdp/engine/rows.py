"""Sorts the parameters of a unit into buckets: at construction, and again when the user has replaced parameters.

A bucket has one dtype and one mesh (see ``row.py``). Most units have one bucket. Others have several, for example with
a norm in float32 next to weights in bfloat16, or with experts that are sharded over fewer ranks than the other
parameters. A parameter with a custom all-gather has a bucket of its own.

Worked example: ``weight`` and ``bias`` in float32 are in one bucket ``w w b``. If the user converts the module of
``weight`` to bfloat16, the new ``weight`` has another dtype, so there are two buckets, ``w w`` and ``b``. If the user
converts both, there is still one bucket, of another dtype.

Both cases use the same code: it sorts the shards by kind, and each bucket takes its shards. A bucket that would have
the same parameters of the same kind as before is kept, with its memory and its leaves.

*In torch:* each ``FSDPParam`` has its own memory; every all-gather sorts the parameters again.

Spec: FS2-28, FS2-29, FS2-EXT-01, NEW-23.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine import validation
from minifsdp.engine.dtensors import Sharding, local_shard_of, set_local_shard
from minifsdp.engine.layout import OwnedParameter, full_name
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.row import Options, Row

# A `Row`, or an object with the same methods.
AnyRow = Any
# Factories for parameters with a custom all-gather. Each gets the local tensor and the name of a parameter, and returns
# a function that creates its bucket, or ``None``. Registered from outside, see ``minifsdp/__init__.py``.
special_rows: list[Callable[[torch.Tensor, str], Callable[..., AnyRow] | None]] = []


class Entry:
    """One parameter of the unit.

    Attributes:
        parameter: the sharded parameter, which the optimizer updates.
        leaf: the unsharded parameter, which autograd owns and modules compute with.
        plain_leaf: the memory of `leaf`; the same tensor, except with tensor parallelism.
        owned: shape and slots.
        sharding: how it is sharded, and how a shard becomes a DTensor.
        row, number: the bucket with its memory, and its index there.
        local_shard: the local tensor of `parameter`.
        unreduced: gradient that waits for its reduction.
        is_trained: ``requires_grad`` of `parameter` and `leaf` when they last agreed.
    """

    parameter: nn.Parameter
    row: AnyRow
    number: int
    local_shard: torch.Tensor

    def __init__(self, owned: OwnedParameter, sharding: Sharding) -> None:
        self.owned, self.sharding = owned, sharding
        self.unreduced: torch.Tensor | None = None

    def replace(self, original: nn.Parameter) -> None:
        """Creates the sharded parameter that replaces the user's parameter."""
        self.parameter = nn.Parameter(self.sharding.wrap(self.local_shard), requires_grad=original.requires_grad)
        # `nn.Parameter` detaches, which replaces the local tensor. Restore it.
        set_local_shard(self.parameter, self.local_shard)
        # Copy attributes set by users, such as marks for optimizer groups. Skip those of a tensor subclass: the shards
        # have them as well, and those of the original may hold the unsharded values.
        for name in vars(original).keys() - vars(self.local_shard).keys():
            setattr(self.parameter, name, vars(original)[name])
        validation.note_taken(original, self.owned.path, is_replaced=True)
        for slot in self.owned.slots:
            # Store the module and name, not the tensor: a reference, even a weak one, makes `to()` fail for a DTensor.
            validation.note_place(slot.module, slot.name, self.owned.path)
        self.make_leaf()

    def make_leaf(self) -> None:
        """Creates a new leaf, after its bucket has allocated new memory for it."""
        self.plain_leaf = self.row.leaves[self.number]
        self.leaf = self.sharding.show_whole(self.plain_leaf)
        self.is_trained = self.parameter.requires_grad
        self.leaf.requires_grad_(self.is_trained)

    def follow_requires_grad(self) -> None:
        """The user changed ``requires_grad`` of `parameter` or `leaf`, whichever was registered; updates the other."""
        self.is_trained = not self.is_trained
        self.leaf.requires_grad_(self.is_trained)
        self.parameter.requires_grad_(self.is_trained)


class Rows:
    """The buckets of one unit, and the entries of the parameters in them.

    Args:
        parameters: at least one.
        shardings: how each is sharded.
        options: device and dtypes.

    Attributes:
        entries: one for each parameter, in order.
        rows: at least one.
    """

    def __init__(
        self, parameters: Mapping[nn.Parameter, OwnedParameter], shardings: Sequence[Sharding], options: Options
    ) -> None:
        self._options = options
        self._made: dict[object, AnyRow] = {}
        self.entries = [Entry(owned, sharding) for owned, sharding in zip(parameters.values(), shardings, strict=True)]
        self._sort([sharding.cut_out_of(original) for original, sharding in zip(parameters, shardings, strict=True)])
        for entry, original in zip(self.entries, parameters, strict=True):
            entry.replace(original)

    def _sort(self, local_shards: Sequence[torch.Tensor]) -> None:
        """Assigns each shard to a bucket of one dtype and mesh. A parameter with a custom all-gather gets its own."""
        sorted_in: dict[Any, list[int]] = {}
        for number, (entry, local_shard) in enumerate(zip(self.entries, local_shards, strict=True)):
            special = next(filter(None, (ask(local_shard, entry.owned.path) for ask in special_rows)), None)
            alone = number if special else None
            sorted_in.setdefault((special, alone, local_shard.dtype, entry.sharding.table), []).append(number)
        before, self._made = self._made, {}
        for (special, *_), numbers in sorted_in.items():
            mine = [local_shards[number] for number in numbers]
            key = (special, mine[0].dtype, self._options.home_of(mine[0]), *numbers)
            row = before.get(key)
            if row is None:
                row = self._make(special, numbers, mine)
            else:
                row.take(mine)
            self._made[key] = row
            for place, number in enumerate(numbers):
                entry = self.entries[number]
                entry.row, entry.number, entry.local_shard = row, place, row.local_shards[place]
        self.rows = list(self._made.values())

    def _make(self, special: Any, numbers: list[int], local_shards: list[torch.Tensor]) -> AnyRow:
        entries = [self.entries[number] for number in numbers]
        cuts, first = [entry.sharding.cut for entry in entries], entries[0].sharding
        if special is None:
            return Row(cuts, local_shards, first.table.shard, self._options)
        module = entries[0].owned.slots[0].module
        return special(cuts[0], local_shards[0], first.table.shard, self._options, first.shard_axis, module)

    def rest(self, group: Group, mesh: DeviceMesh) -> list[torch.Tensor]:
        """Reshards all buckets to the ranks of ``group``, the last dim of ``mesh``; returns DTensors over ``mesh``."""
        local_shards = {id(row): row.rest(group) for row in self.rows}
        shown: list[torch.Tensor] = []
        for entry in self.entries:
            whole = entry.sharding.wrap_among(mesh, local_shards[id(entry.row)][entry.number])
            requires_grad = entry.parameter.requires_grad
            shown.append(entry.parameter if whole is None else nn.Parameter(whole, requires_grad=requires_grad))
        return shown

    def take_over(self, unit_name: str) -> None:
        """Copies the current values of the parameters into their buckets.

        Raises:
            RuntimeError: they are on different devices.
        """
        local_shards = [local_shard_of(entry.parameter) for entry in self.entries]
        if len({local_shard.device for local_shard in local_shards}) > 1:
            raise _converted_apart(self.entries, unit_name)
        # From now on the values stay on the device that the user chose.
        self._options = replace(self._options, offload=False)
        self._sort(local_shards)
        for entry in self.entries:
            set_local_shard(entry.parameter, entry.local_shard)


def _converted_apart(entries: Sequence[Entry], unit_name: str) -> RuntimeError:
    paths = [
        f"{full_name(unit_name, entry.owned.path)} ({local_shard_of(entry.parameter).device})" for entry in entries
    ]
    return RuntimeError(message("converted-apart", parameters=", ".join(paths)))
