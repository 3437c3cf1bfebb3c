"""Checks of the modules and parameters that ``fully_shard`` gets, before any of them changes.

Worked example: a parameter without dims has no rows to distribute. `check_parameter` raises an error with its name.

*In torch:* checks in ``_fully_shard.py``, ``_fsdp_init.py`` and ``FSDPParam``, some of them assertions.

Spec: FS2-01, FS2-06, FS2-08, NEW-04.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from minifsdp.cases.smaller_mesh import check_number
from minifsdp.checks import ownership
from minifsdp.checks.arguments import (
    FUNCTION_OR_NONE,
    MESH,
    PARAMETERS,
    PRECISION_POLICY,
    Kind,
    is_only_called_in_parts,
    require,
)
from minifsdp.engine.messages import message
from minifsdp.engine.shards import local_tensor
from minifsdp.fsdp2.options import OffloadPolicy


class NoModulesError(ValueError, IndexError):
    """``fully_shard`` got an empty list. Torch raises ``IndexError``."""


# Torch's own CPUOffloadPolicy would be treated as no offload.
_OFFLOAD = Kind(
    "an OffloadPolicy of minifsdp, or None",
    lambda value: (
        isinstance(value, OffloadPolicy | None)
        or type(value).__name__ == "OffloadPolicy"
    ),
)

_MESH_DIMS = Kind(
    "a DataParallelMeshDims or None",
    lambda value: value is None or hasattr(value, "shard_names"),
)


def check_options(
    call: str,
    *,
    mesh: Any,
    mp_policy: Any,
    offload_policy: Any,
    ignored_params: Any,
    dp_mesh_dims: Any,
    reshard_after_forward: Any = None,
    shard_placement_fn: Any = None,
) -> None:
    """Checks the arguments of ``fully_shard`` or ``replicate`` apart from the modules. ``call`` is the function.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if ``reshard_after_forward`` is a number that does not divide the number of ranks.
        NotImplementedError: if an option is not supported.
    """
    require(MESH, call, mesh=mesh)
    require(FUNCTION_OR_NONE, call, shard_placement_fn=shard_placement_fn)
    require(PRECISION_POLICY, call, mp_policy=mp_policy)
    require(_OFFLOAD, call, offload_policy=offload_policy)
    require(PARAMETERS, call, ignored_params=ignored_params)
    require(_MESH_DIMS, call, dp_mesh_dims=dp_mesh_dims)
    if dp_mesh_dims is not None:
        # As in torch, a number cannot be combined with it.
        if not isinstance(reshard_after_forward, bool | None):
            raise NotImplementedError(message("reshard-number-and-dims"))
    elif mesh is not None or dist.is_initialized():
        size = mesh.size(mesh.ndim - 1) if mesh is not None else dist.get_world_size()
        check_number(reshard_after_forward, size)


def check_modules(
    modules: Sequence[Any], call: str, is_sharded: Callable[[nn.Module], bool]
) -> None:
    """Checks the modules of one call of ``fully_shard`` or ``replicate``.

    Raises:
        TypeError: if an object is not a module.
        ValueError: if there is none, one has no forward or contains another, or the other API has sharded one.
        AssertionError: if ``fully_shard`` was called on one before.
    """
    if wrong := [one for one in modules if not isinstance(one, nn.Module)]:
        raise TypeError(message("fully-shard-type", call=call, wrong=wrong[0]))
    if not modules:
        raise NoModulesError(message("no-modules", call=call))
    for module in modules:
        # In a list of several modules, the forwards of the other modules all-gather its parameters.
        if len(modules) == 1 and is_only_called_in_parts(module):
            raise ValueError(
                message("no-forward", call=call, type=type(module).__name__)
            )
        if is_sharded(module):
            raise AssertionError(
                message("sharded-twice", call=call, type=type(module).__name__)
            )
        ownership.check_one_api(module, "fully_shard")
    if inside := [
        one
        for one in modules
        for other in modules
        if other is not one and one in set(other.modules())
    ]:
        raise ValueError(
            message("nested-in-list", call=call, type=type(inside[0]).__name__)
        )


def check_parameter(
    parameter: nn.Parameter, path: str, placement: Any, num_shards: int
) -> None:
    """Checks that a parameter can be sharded.

    Args:
        parameter: the original parameter.
        path: its name inside the unit.
        placement: a ``Shard``, or ``None`` for the first dim.
        num_shards: the number of shards.

    Raises:
        NotImplementedError: if the dim is not the first and not divisible, or the values are not contiguous.
        ValueError: if the parameter has no dims, or the placement is not a ``Shard`` of one of them.
    """
    where = f"parameter {path!r}"
    if parameter.ndim == 0:
        raise ValueError(message("scalar-parameter", where=where))
    if not isinstance(placement, Shard | None):
        raise ValueError(message("placement-type", where=where, placement=placement))
    local = local_tensor(parameter.detach())
    shape = tuple(local.shape)
    if not local.is_contiguous():
        raise NotImplementedError(
            message("not-contiguous", where=where, shape=shape, stride=local.stride())
        )
    dim = 0 if placement is None else placement.dim
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(
            message("placement-dim", where=where, shape=tuple(parameter.shape), dim=dim)
        )
    if dim % parameter.ndim != 0 and shape[dim] % num_shards:
        raise NotImplementedError(
            message(
                "uneven-dim", dim=dim % len(shape), shape=shape, num_shards=num_shards
            )
        )
