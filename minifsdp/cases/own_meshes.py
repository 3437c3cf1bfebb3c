"""``ShardPlacementResult``: one parameter of a unit is sharded over another mesh.

Each of two groups of ranks trains its own experts. The other parameters are sharded over all ranks::

    experts = {block.experts.weight for block in model.blocks}
    info = FSDPMeshInfo(mesh["data"], shard_mesh_dim=0)

    def place(parameter):
        return ShardPlacementResult(None, info) if parameter in experts else None

    for block in model.blocks:
        fully_shard(block, shard_placement_fn=place)
    fully_shard(model, shard_placement_fn=place)

Without this case, the result is not a ``Shard``, which raises an error. A call of ``fully_shard`` for each module with
experts, with another ``mesh``, needs more all-gathers.

The case replaces the result by its placement and its mesh. The engine itself supports several meshes in a unit.

*In torch:* ``FSDPParam`` reads the mesh of this result.

Spec: NEW-23.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from minifsdp.engine.messages import message


def own_mesh(placement: Any, mesh: DeviceMesh, path: str) -> tuple[Any, DeviceMesh]:
    """The placement and the mesh of the parameter ``path``; those given unless ``placement`` has a mesh.

    Raises:
        ValueError: if the axes of the mesh are not (shard) or (replicate, shard).
    """
    info = getattr(placement, "mesh_info", None)
    if info is None:
        return placement, mesh
    axes = (
        (info.shard_mesh_dim,)
        if info.replicate_mesh_dim is None
        else (info.replicate_mesh_dim, info.shard_mesh_dim)
    )
    if axes != tuple(range(info.mesh.ndim)):
        raise ValueError(
            message("placement-mesh", path=path, ndim=info.mesh.ndim, axes=axes)
        )
    return placement.placement, info.mesh
