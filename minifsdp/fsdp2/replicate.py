"""``replicate``: data parallelism without sharding. Each rank has all parameters, and gradients are averaged.

::

    for block in model.blocks:
        replicate(block)                # one all-reduce for each block, while backward computes the next one
    replicate(model)
    optimizer = torch.optim.Adam(model.parameters())

It is `fully_shard` on a mesh with replicas only. So the model has the methods of `FSDPModule`, mixed precision, and a
``DTensor`` for each parameter. Its placement is ``Replicate()``, and its local tensor is the complete parameter.

Worked example, two ranks, a (4, 4) weight: both hold 16 elements. A step issues one all-reduce of 16 elements, and no
all-gather.

*In torch:* ``torch.distributed._composable.replicate_with_fsdp``.

Spec: NEW-32.
"""

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import _dtensor_spec as dtensor_spec

from minifsdp.cases.default_mesh import default_mesh
from minifsdp.cases.full_mesh import FullMesh
from minifsdp.checks import shardable
from minifsdp.checks.attach import attach
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.messages import message
from minifsdp.engine.sharded_param import ShardedParam
from minifsdp.fsdp2.fsdp_state import state_of
from minifsdp.fsdp2.fully_shard import ParamMesh, shard_modules
from minifsdp.fsdp2.module import FSDPModule
from minifsdp.fsdp2.options import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module | list[nn.Module])


class ReplicateModule(FSDPModule):
    """A module on which ``replicate`` was called. It has the methods of `FSDPModule`."""

    _name_of_call = "replicate"


class ReplicatedParam(ShardedParam):
    """A parameter that each rank of the mesh has. Its arguments are those of `ShardedParam`."""

    def _make_spec(self, original: Any, mesh: DeviceMesh) -> dtensor_spec.DTensorSpec:
        """The spec with `Replicate` on the mesh, before the placements of tensor parallelism."""
        spec = super()._make_spec(original, mesh)
        placements = (Replicate(), *spec.placements[1:])
        return dtensor_spec.DTensorSpec(
            spec.mesh, placements, tensor_meta=spec.tensor_meta
        )


def replicate(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Replicates ``module``'s parameters over the ranks of ``mesh``, in place. Backward averages the gradients.

    Every rank of the mesh must call it, on modules with equal values, of the same structure, and in the same order.

    Args:
        module: the module, or a list of modules that form one unit.
        mesh: a mesh with one dimension; ``None`` for all ranks, see `fully_shard`.
        mp_policy: the mixed-precision policy. Gradients are averaged in its ``reduce_dtype``.
        offload_policy: whether the parameters are stored on the CPU.
        ignored_params: parameters that are not replicated. Their gradients stay local.
        dp_mesh_dims: a `DataParallelMeshDims` with ``replicate`` only; the parameters are DTensors on ``mesh``.

    Returns:
        ``module``.

    Raises:
        RuntimeError: if ``fully_shard`` was called on a module.
        ValueError: if a module cannot be replicated, the mesh has another shape, or ``dp_mesh_dims`` has ``shard``.
        AssertionError: if ``replicate`` was called on a module before.
    """
    shardable.check_options(
        "replicate",
        mesh=mesh,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )
    modules: list[nn.Module] = (
        list(module) if isinstance(module, list | tuple) else [module]
    )
    for one in modules:
        if isinstance(one, FSDPModule) and not isinstance(one, ReplicateModule):
            raise RuntimeError(
                message("replicate-in-fully-shard", type=type(one).__name__)
            )
    shardable.check_modules(modules, "replicate", lambda one: state_of(one) is not None)
    if dp_mesh_dims is not None and dp_mesh_dims.shard_names:
        raise ValueError(
            message("replicate-with-shard", shard=dp_mesh_dims.shard_names)
        )
    mesh = mesh if mesh is not None else default_mesh(("replicate",))
    if dp_mesh_dims is None and mesh.ndim != 1:
        raise ValueError(message("replicate-mesh", mesh=mesh))
    attach()
    shard_modules(
        modules,
        FullMesh(mesh, dp_mesh_dims) if dp_mesh_dims is not None else _replicas(mesh),
        mp_policy,
        offload_policy,
        ignored_params,
        base=ReplicateModule,
    )
    return module


def _replicas(mesh: DeviceMesh) -> ParamMesh:
    groups = MeshGroups.replicated(Group.of(mesh.get_group()))
    return ParamMesh(mesh, groups, ReplicatedParam)


replicate.state = state_of  # type: ignore[attr-defined]
