"""``set_symm_mem_for_comm``: the memory of collectives is symmetric memory, which the GPUs of a group share.

A program for GPUs that are connected by NVLink::

    os.environ["NCCL_CTA_POLICY"] = "2"  # NCCL copies with copy engines instead of kernels
    dist.init_process_group("nccl", device_id=device)
    fully_shard(model)
    model.set_symm_mem_for_comm()

Without this case, the method does not exist. An all-gather in symmetric memory leaves the multiprocessors of the GPU to
the computation. The memory comes from PyTorch's pool of symmetric memory, which reuses it. Before each collective, the
ranks exchange the addresses of memory that the pool has not seen yet (*rendezvous*).

The case is a line of ``added_methods.py``.

*In torch:* ``SymmMemAllGather`` and ``SymmMemReduceScatter``. Reductions use this memory only after
``set_force_sum_reduction_for_comms(True)``; here reductions always sum.

Spec: NEW-33.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from minifsdp.cases.program_collectives import (
    ByProcessGroup,
    groups_without_objects,
    send_by,
)
from minifsdp.engine.messages import message


class InSymmetricMemory(ByProcessGroup):
    """Sends by the process group, in symmetric memory."""

    def allocate(
        self, size: tuple[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """1-D memory for a collective."""
        pool = symm_mem.get_mem_pool(device)
        with torch.get_device_module(device).use_mem_pool(pool):
            return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
        op: Any = None,
    ) -> None:
        """Issues an all-gather or, with ``op``, a reduce-scatter."""
        # The input of an all-gather is a part of its output.
        for tensor in (output_tensor,) if op is None else (input_tensor, output_tensor):
            symm_mem.rendezvous(tensor, group=group.group_name)
        super().__call__(output_tensor, input_tensor, group, async_op, op)


class SymmetricMemory:
    """The method of `FSDPModule` for symmetric memory."""

    _get_fsdp_state: Callable[[], Any]

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        """Allocates the memory of this unit's collectives as symmetric memory, without inner units (NEW-33).

        All ranks of the mesh must call it, because it waits for them.

        Args:
            backend: the backend of symmetric memory, see ``torch.distributed._symmetric_memory.set_backend``.

        Raises:
            RuntimeError: if the parameters are not on GPUs, or PyTorch does not have this backend.
            AssertionError: if the program has set an object for these collectives.
        """
        call = "set_symm_mem_for_comm"
        unit = self._get_fsdp_state().unit
        groups = groups_without_objects(unit, call)
        if groups and unit.layout.device.type == "cpu":
            raise RuntimeError(message("symmetric-memory", call=call))
        for group in groups:
            symm_mem.set_backend(backend)
            # NCCL creates its communicator, which the exchange of addresses needs.
            dist.barrier(group.process_group)
        send_by(unit, InSymmetricMemory())
