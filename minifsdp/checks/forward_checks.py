"""Checks when a forward begins, before its first collective. So a mistake raises an error on every rank.

* A ``DistributedDataParallel`` *around* sharded copies of a model. DDP would wait for gradients of parameters that
  never get one.
* A *function transform* around the model, for example ``torch.func.grad``. It computes gradients that no hook of a unit
  receives. ``torch.vmap`` is allowed.

Worked example: ``DistributedDataParallel(model)`` around a model whose blocks are sharded raises an error with the name
of the first parameter that DDP would wait for.

*In torch:* an internal assertion of DDP fails; the transform raises an error of autograd.

Spec: MYTH-28, PROG-31.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message
from minifsdp.engine.unit import Unit


def check_transforms(units: Sequence[Unit]) -> None:
    """Checks that no function transform other than ``torch.vmap`` is active.

    Raises:
        RuntimeError: if one is.
    """
    functorch = torch._C._functorch
    levels = functorch.get_interpreter_stack() or []
    if any(level.key() != functorch.TransformType.Vmap for level in levels):
        raise RuntimeError(
            message("function-transform", unit=units[0].name if units else "")
        )


def check_not_in_ddp(units: Sequence[Unit]) -> None:
    """Checks that no DDP around the model would average sharded gradients. Called before a forward.

    A DDP is allowed if it ignores these parameters, or if FSDP already averages gradients over all of its ranks.

    Raises:
        RuntimeError: if a DDP waits for gradients of the parameters of a unit that FSDP does not average over all its
            ranks.
    """
    around = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if around is None or not torch.is_grad_enabled():
        return
    ranks = dist.get_process_group_ranks(around.process_group)
    apart = {
        parameter
        for unit in units
        if not _covers(unit.plans[0].mesh, ranks)
        for parameter in unit.layout.local_parameters
    }
    for name, parameter in around.module.named_parameters():
        if (
            parameter in apart
            and parameter.requires_grad
            and name not in around.parameters_to_ignore
        ):
            raise RuntimeError(message("ddp-around", name=name, ranks=ranks))


def _covers(mesh: MeshGroups, ranks: Sequence[int]) -> bool:
    """Whether a mean over a mesh is a mean over all of ``ranks``, as far as this rank's two groups show."""
    groups = filter(None, (mesh.shard, mesh.replicate))
    known = {dist.get_rank()}.union(*(group.ranks for group in groups))
    return mesh.num_ranks == dist.get_world_size() or known.issuperset(ranks)
