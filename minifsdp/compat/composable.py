"""The attributes through which PyTorch and libraries detect a module on which ``fully_shard`` was called.

PyTorch has several functions that change a module without wrapping it. ``replicate`` can be combined with
``fully_shard``: one layer is replicated on every rank, the rest is sharded. Each function adds its name to a registry
on the module, and reads this registry before it takes parameters::

    replicate(model.embed)      # adds "replicate" to the registry of `embed`
    fully_shard(model)          # takes all parameters except those of `embed`, and adds "fully_shard"
    replicate(model)            # finds "fully_shard" and raises an error

Each function also stores a state for the module. Libraries read this state, and some of its attributes, to avoid
sharding a module twice::

    state = torch.distributed._composable_state._get_module_state(module)
    if state is not None:                               # sharded already
        group = state._fsdp_param_group                 # None if it has no parameters
        dtype = group and group._reduce_dtype

Worked example, ``fully_shard(block)`` and ``fully_shard(model)`` with ``reduce_dtype=float32`` and bfloat16 parameters.
Both modules have a state whose group returns float32. ``_is_root`` is ``None`` on both until the first forward, then
``True`` for ``model`` and ``False`` for ``block``. A module inside ``block`` has no state of its own.

*In torch:* the decorator ``contract``; ``FSDPState`` and ``FSDPParamGroup``, which have these attributes and more.

Spec: FS2-09, FS2-11, FS2-29, START-07, PROG-84.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _insert_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common

from minifsdp.engine.compiler import step_over_this_package
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.unit import Unit
from minifsdp.fsdp2.options import MixedPrecisionPolicy
from minifsdp.fsdp2.reshard import smaller_mesh


@dataclass(frozen=True)
class ParamGroup:
    """The attributes of a unit that libraries read; the attribute ``_fsdp_param_group`` of `FSDPState`.

    Attributes:
        mp_policy: the user's mixed-precision policy.
    """

    _unit: Unit[PerParameterLayout]
    mp_policy: MixedPrecisionPolicy
    _reshard_to: bool | int | None

    @property
    def mesh_info(self) -> fsdp_common.FSDPMeshInfo:
        """The mesh that the parameters are sharded over."""
        return _info(self._unit.layout.params[0].mesh)

    @property
    def post_forward_mesh_info(self) -> fsdp_common.FSDPMeshInfo | None:
        """The mesh that the parameters are resharded to after forward; ``None`` if they stay unsharded."""
        policy, mesh = self._unit.policy, self.mesh_info.mesh
        if not policy.reshard_after_forward:
            return None
        return _info(smaller_mesh(mesh, int(self._reshard_to or 0)) if policy.post_forward_mesh else mesh)

    @property
    def _orig_dtype(self) -> torch.dtype | None:
        """The dtype of the sharded parameters that require gradients."""
        return next((p.dtype for p in self._unit.layout.local_parameters() if p.requires_grad), None)

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        """The dtype for gradient reduction; ``None`` if it is the dtype that gradients are computed in."""
        reduce = self.mp_policy.reduce_dtype
        return reduce if self._unit.layout.is_trained and reduce is not self.mp_policy.param_dtype else None


def _info(mesh: DeviceMesh) -> fsdp_common.FSDPMeshInfo:
    """Converts the mesh to torch's class."""
    if mesh.ndim == 1:
        return fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def register(state: Any, modules: list[nn.Module]) -> None:
    """Stores the state of ``modules`` where PyTorch and libraries look for it."""
    step_over_this_package()
    for module in modules:
        module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = None
        _insert_module_state(module, state)
        # `torch.distributed.fsdp.fully_shard.state(module)` returns the state.
        # A program may have replaced torch's function, which has this attribute.
        original = getattr(torch_fsdp.fully_shard, "__wrapped__", None)
        module.__dict__.setdefault(STATE_KEY, {})[original] = state
