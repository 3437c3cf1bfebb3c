"""Libraries and pipeline schedules that read the attributes of torch's ``FSDPState``.

Worked example, ``fully_shard(block)`` and ``fully_shard(model)`` with ``reduce_dtype=float32`` and bfloat16 parameters.
A library looks up the dtype of the reduction, and does not shard a module twice::

    for module in model.modules():
        state = torch.distributed._composable_state._get_module_state(module)
        if state is not None:                            # sharded already
            group = state._fsdp_param_group              # None if it has no parameters
            print(state._is_root, group and group._reduce_dtype)

This prints float32 twice. ``_is_root`` is ``None`` on both until the first forward, then ``True`` for ``model`` and
``False`` for ``block``. A module inside ``block`` has no state of its own.

Without this case, the library raises an ``AttributeError``, and so do the pipeline schedules of torch before 2.15.

The case is a base class of `FSDPState`. It only reads the state, except for the method of the schedules.

*In torch:* ``FSDPState`` and ``FSDPParamGroup``, which have these attributes and more.

Spec: FS2-29, START-07, PROG-84.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common

from minifsdp.cases.manual_finalization import finish, reduce_all
from minifsdp.cases.smaller_mesh import mesh_after_forward, smaller_mesh
from minifsdp.engine.mesh import MeshGroups
from minifsdp.fsdp2.options import MixedPrecisionPolicy


class TorchAttributes:
    """The attributes of a state that libraries read."""

    # The pipeline schedules of torch before 2.15 call a method of each of these states, and
    # `_root_post_backward_final_callback` after it, which is enough.
    _state_ctx = SimpleNamespace(all_states=())

    def _root_post_backward_final_callback(self: Any) -> None:
        """Reduces all gradients after the last micro-batch, if a pipeline schedule has split each backward.

        The gradients of the weights are then computed by ``autograd.grad``, which calls no hooks of the unit.
        """
        iteration = self.current_root_state().iteration
        reduce_all(iteration)
        finish(iteration)

    @property
    def _comm_ctx(self: Any) -> object:
        """The same object for states that share communication streams."""
        return self.shared_comm_streams or self

    @property
    def _fsdp_param_groups(self: Any) -> list["ParamGroup"]:
        if self.unit is None:
            return []
        first = self.unit.layout.params[0]
        mesh = first.mesh
        groups = first.mesh_groups
        chosen = mesh_after_forward(self.unit)
        after_forward = smaller_mesh(mesh, chosen.num_shards) if chosen else mesh
        parameters = self.unit.layout.local_parameters
        dtype = next((p.dtype for p in parameters if p.requires_grad), None)
        reduce = self._mp_policy.reduce_dtype
        has_own = dtype is not None and reduce is not self._mp_policy.param_dtype
        return [
            ParamGroup(
                mp_policy=self._mp_policy,
                mesh_info=_info(mesh, groups),
                post_forward_mesh_info=_info(after_forward, groups)
                if self.unit.policy.reshard_after_forward
                else None,
                _orig_dtype=dtype,
                _reduce_dtype=reduce if has_own else None,
            )
        ]

    @property
    def _fsdp_param_group(self) -> "ParamGroup | None":
        return next(iter(self._fsdp_param_groups), None)


@dataclass(frozen=True)
class ParamGroup:
    """The attributes of a unit that libraries read; the attribute ``_fsdp_param_group`` of a state.

    Attributes:
        mp_policy: the user's mixed-precision policy.
        mesh_info: the mesh that the parameters are sharded over.
        post_forward_mesh_info: the mesh that they are resharded to after forward; ``None`` if they stay unsharded.
        _orig_dtype: the dtype of the sharded parameters that require gradients.
        _reduce_dtype: the dtype for gradient reduction; ``None`` if it is the dtype that gradients are computed in.
    """

    mp_policy: MixedPrecisionPolicy
    mesh_info: fsdp_common.DataParallelMeshInfo
    post_forward_mesh_info: fsdp_common.DataParallelMeshInfo | None
    _orig_dtype: torch.dtype | None
    _reduce_dtype: torch.dtype | None


def _info(mesh: DeviceMesh, groups: MeshGroups) -> Any:
    """Converts the mesh to torch's class."""
    if mesh.ndim == 1 and groups.replicate is not None:
        return fsdp_common.DDPMeshInfo(mesh, replicate_mesh_dim=0)
    if mesh.ndim == 1:
        return fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
