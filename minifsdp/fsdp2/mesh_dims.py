"""``DataParallelMeshDims``: the names of the dimensions of a mesh for data parallelism.

Worked example: on a mesh with the dimensions ``("copies", "data", "cut")``, the argument
``dp_mesh_dims=DataParallelMeshDims(shard="data", replicate="copies")`` of ``fully_shard`` shards over ``data`` and
replicates over ``copies``. Another kind of parallelism uses ``cut``, see ``cases/full_mesh.py``.

*In torch:* the class of the same name in ``_fsdp_common.py``.

Spec: NEW-18, NEW-31.
"""

from dataclasses import dataclass

from minifsdp.engine.messages import message


@dataclass
class DataParallelMeshDims:
    """Names of the mesh dimensions for data parallelism. At least one of the two must be given.

    Attributes:
        shard: the dimensions to shard parameters over.
        replicate: the dimensions to replicate parameters over.

    Raises:
        ValueError: if neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(message("no-mesh-dims"))

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dimensions to shard over, as a tuple; empty for none."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dimensions to replicate over, as a tuple; empty for none."""
        return _names(self.replicate)


def _names(dims: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else tuple(dims or ())
