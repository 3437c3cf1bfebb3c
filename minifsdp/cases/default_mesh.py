"""``fully_shard`` without ``mesh``: all ranks, also if the program has not initialized ``torch.distributed``.

A program for torchrun::

    fully_shard(model)                           # initializes the default process group
    optimizer = torch.optim.Adam(model.parameters())

Without this case, ``mesh`` is needed in each call, and ``torch.distributed.init_process_group`` before the first one.

The mesh has one dimension, and the device of the accelerator that the machine has.

*In torch:* ``_init_default_mesh``.

Spec: START-02.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifsdp.engine.messages import message


def default_mesh(names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all ranks, with these names of its dimensions.

    Raises:
        ValueError: if there is neither a default process group nor the environment variables of a launcher.
    """
    if not torch.distributed.is_initialized():
        try:
            torch.distributed.init_process_group()
        except ValueError as error:
            raise ValueError(message("no-launcher", error=error)) from error
    # Without `check_available`, a GPU build reports its accelerator even if the machine has none.
    device = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(
        device.type if device is not None else "cpu",
        (torch.distributed.get_world_size(),),
        mesh_dim_names=names,
    )
