"""A program that sends a unit's parameters or gradients itself, allocates their memory, or reduces in another group.

The program counts the bytes of a unit's all-gathers::

    class Counted(AllGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            self.num_bytes += output_tensor.nbytes
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    fully_shard(model)
    model.set_custom_all_gather(Counted())

Without this case, the methods raise an error: a sharded module does not have them. The case gives the unit another
`Group` with the same ranks: its `sender` is a `Sender`, which calls the object of the program, or its process group is
another one. The engine sends as before. The object is called in the stream of the collective, and its memory is copied
from and to the unit's memory in the same stream.

The case is a line of ``added_methods.py``.

*In torch:* attributes of ``FSDPParamGroup``. The memory that the object allocates is the memory of the unit.

Spec: NEW-27, NEW-28.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.checks.arguments import SWITCH, Kind, require
from minifsdp.engine.bucket import Bucket
from minifsdp.engine.collectives import (
    GATHER,
    GATHER_METHOD,
    REDUCE_SCATTER,
    SCATTER_METHOD,
)
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.unit import Unit
from minifsdp.fsdp2.fsdp_state import states_for

COMMUNICATION = Kind(
    "an object that can be called, with a method allocate()",
    lambda value: callable(value) and hasattr(value, "allocate"),
)


class Sender:
    """Sends the collectives of a group by an object of the program, see `Group.sender`.

    A method returns when the collective is complete, or when the current stream of the accelerator contains it.

    Args:
        group: the process group, an argument of the object.
        communication: the object; also an attribute.
    """

    def __init__(self, group: dist.ProcessGroup, communication: Any) -> None:
        self.communication = communication
        self._group = group
        setattr(self, GATHER_METHOD, self._all_gather)
        setattr(self, SCATTER_METHOD, self._reduce_scatter)

    def _all_gather(
        self, output: torch.Tensor, local_shard: torch.Tensor, _: Any
    ) -> None:
        whole = self._allocate_like(output)
        # As in torch, the input is a part of the output.
        mine = whole.chunk(self._group.size())[self._group.rank()]
        mine.copy_(local_shard)
        self.communication(
            output_tensor=whole, input_tensor=mine, group=self._group, async_op=False
        )
        output.copy_(whole)

    def _reduce_scatter(
        self, local_shard: torch.Tensor, whole: torch.Tensor, _: Any
    ) -> None:
        sent = self._allocate_like(whole)
        sent.copy_(whole)
        reduced = self._allocate_like(local_shard)
        self.communication(
            output_tensor=reduced,
            input_tensor=sent,
            group=self._group,
            op=dist.ReduceOp.SUM,
            async_op=False,
        )
        local_shard.copy_(reduced)

    def _allocate_like(self, tensor: torch.Tensor) -> torch.Tensor:
        memory: torch.Tensor = self.communication.allocate(
            (tensor.numel(),), dtype=tensor.dtype, device=tensor.device
        )
        return memory.view(tensor.shape)


class ByProcessGroup:
    """Sends by the process group. A subclass allocates the memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
        op: Any = None,
    ) -> None:
        """Issues an all-gather or, with ``op``, a reduce-scatter."""
        name, options = (
            (GATHER_METHOD, GATHER) if op is None else (SCATTER_METHOD, REDUCE_SCATTER)
        )
        work = getattr(group, name)(output_tensor, input_tensor, options)
        if work is not None:
            work.wait()


class FromProcessGroup(ByProcessGroup):
    """In memory that the backend of the process group allocates.

    Args:
        backend: the backend.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def allocate(
        self, size: tuple[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """1-D memory for a collective."""
        memory: torch.Tensor = self._backend.allocate_tensor(
            size[0], dtype=dtype, device=device
        )
        return memory


class ProgramCollectives:
    """Methods of `FSDPModule` that set how a unit's parameters and gradients are sent. All ranks must call them."""

    _get_fsdp_state: Callable[[], Any]

    def set_custom_all_gather(self, comm: Any) -> None:
        """Sets the object that all-gathers this module's unit, without inner units (NEW-27).

        Args:
            comm: called with the keywords ``output_tensor``, ``input_tensor``, ``group`` and ``async_op``. Its method
                ``allocate(size, dtype=..., device=...)`` returns memory for the output.

        Raises:
            TypeError: if ``comm`` cannot be called or has no method ``allocate``.
            ValueError: if the parameters of the unit have several meshes.
        """
        for unit in _units_for(self, "set_custom_all_gather", comm):
            _send_parameters(unit.layout, comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Sets the object that reduce-scatters the gradients of this module's unit, without inner units (NEW-27).

        Args:
            comm: as in `set_custom_all_gather`, with the further keyword ``op``, which is ``ReduceOp.SUM``: the unit
                divides separately. ``allocate`` returns memory for the input and for the output.

        Raises:
            TypeError: if ``comm`` cannot be called or has no method ``allocate``.
            ValueError: if the parameters of the unit have several meshes.
        """
        for unit in _units_for(self, "set_custom_reduce_scatter", comm):
            _send_gradients(unit.plans[0], comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Sets whether the backend allocates the memory of this unit's collectives, if it can (NEW-27).

        Raises:
            AssertionError: if the program has set an object for these collectives.
        """
        call = "set_allocate_memory_from_process_group_for_comm"
        require(SWITCH, call, enable=enable)
        unit = self._get_fsdp_state().unit
        communication = None
        for group in groups_without_objects(unit, call):
            backend = group.process_group._get_backend(unit.layout.device)
            if enable and backend.supports_tensor_alloc(unit.layout.device):
                communication = FromProcessGroup(backend)
        send_by(unit, communication)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Sets whether gradients are reduce-scattered in a process group of their own (NEW-28).

        NCCL runs the collectives of one group one after the other. With two groups, an all-gather and a reduce-scatter
        can run at the same time. All ranks of the mesh must call it, because it creates the group.

        Args:
            enable: whether to create the group, once for each set of ranks; ``False`` restores the group of the
                all-gathers.
            recurse: whether it applies to the units inside the module, too.
        """
        require(SWITCH, "set_separate_reduce_scatter_group", enable=enable)
        separate: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for state in states_for(self, recurse):
            unit: Any = state.unit
            for plan in () if unit is None else unit.plans:
                number = min(plan.indices or [0])
                shared = unit.layout.params[number].mesh_groups.shard
                used = plan.mesh.shard
                if shared is None or used is None:
                    continue
                if used.process_group is not shared.process_group:
                    separate[used.ranks] = used.process_group
                if enable and used.ranks not in separate:
                    separate[used.ranks] = dist.new_group(
                        list(used.ranks), use_local_synchronization=True
                    )
                chosen = Group.of(separate[used.ranks]) if enable else shared
                plan.mesh = replace(plan.mesh, shard=chosen)
                if used.sender is not None:
                    _send_gradients(plan, used.sender.communication)


def _units_for(module: Any, call: str, comm: Any) -> list[Unit[PerParameterLayout]]:
    """The unit whose collectives ``comm`` sends, if there is one."""
    require(COMMUNICATION, call, comm=comm)
    unit = module._get_fsdp_state().unit
    if unit is None:
        return []
    if len(unit.plans) > 1:
        raise ValueError(message("communication-and-meshes", call=call))
    return [unit]


def groups_without_objects(
    unit: Unit[PerParameterLayout] | None, call: str
) -> list[Group]:
    """The groups that send the parameters and gradients of a unit. There is none without a unit, and with one rank.

    Raises:
        AssertionError: if the program has set an object for a group.
    """
    if unit is None:
        return []
    of_unit = [unit.layout.group, *(plan.mesh.shard for plan in unit.plans)]
    groups = [group for group in of_unit if group is not None]
    for group in groups:
        if group.sender is not None and not isinstance(
            group.sender.communication, ByProcessGroup
        ):
            raise AssertionError(message("own-communication", call=call))
    return groups


def send_by(unit: Unit[PerParameterLayout] | None, communication: Any) -> None:
    """Sends all collectives of a unit by an object; with ``None``, by the process group."""
    if unit is None or unit.layout.group is None:
        return
    _send_parameters(unit.layout, communication)
    for plan in unit.plans:
        _send_gradients(plan, communication)


def _send_parameters(layout: PerParameterLayout, communication: Any) -> None:
    # Buckets that are created later use the groups of the parameters. One bucket has equal groups.
    changed: dict[MeshGroups, MeshGroups] = {}
    for param in layout.params:
        groups = param.mesh_groups
        if groups not in changed:
            shard = _with_sender(groups.shard, communication)
            changed[groups] = replace(groups, shard=shard)
        param.mesh_groups = changed[groups]
    for bucket in layout.buckets:
        bucket.group = bucket.params[0].mesh_groups.shard
        if isinstance(bucket, Bucket):
            bucket._own.group = bucket.group
            bucket._own.sends_each = False
    layout.group = layout.params[0].mesh_groups.shard


def _send_gradients(plan: ReducePlan, communication: Any) -> None:
    plan.mesh = replace(plan.mesh, shard=_with_sender(plan.mesh.shard, communication))


def _with_sender(group: Group | None, communication: Any) -> Group | None:
    """A group with the same ranks that sends by ``communication``; with ``None``, by the process group."""
    if group is None:
        return None
    is_own = communication is not None
    sender = Sender(group.process_group, communication) if is_own else None
    return replace(group, sender=sender)
