"""``fully_shard``: shards a module in place.

::

    for block in model.blocks:
        fully_shard(block)              # one unit for each block
    fully_shard(model)                  # one unit for the remaining parameters
    optimizer = torch.optim.Adam(model.parameters())

The module is not wrapped. The call

1. collects the parameters of the module that no earlier call manages,
2. replaces each of them with a ``DTensor`` that holds this rank's shard,
3. registers two hooks on the module, see ``fsdp_state.py``,
4. and adds methods, hooks for state dicts, and the state that libraries read.

Shard inner modules first and the root last: a unit consists of the parameters that no earlier call manages.

*In torch:* ``_fully_shard.py`` and ``_fsdp_init.py``.

Spec: FS2-01 to FS2-25, NEW-04, NEW-05, NEW-16, NEW-23, NEW-31.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.cases import torch_registry
from minifsdp.cases.default_mesh import default_mesh
from minifsdp.cases.full_mesh import FullMesh
from minifsdp.cases.grad_dtypes import keep_grad_dtypes
from minifsdp.cases.of_fully_shard import BUCKETS, PLACEMENTS, STATES
from minifsdp.cases.optimizer_steps import optimizer_steps
from minifsdp.cases.second_places import find_second_places
from minifsdp.cases.smaller_mesh import reshard_to_number
from minifsdp.cases.sparse_gradients import use_dense_gradients
from minifsdp.checks import ownership, shardable
from minifsdp.checks.attach import attach
from minifsdp.checks.initial_weights import compare_while_debugging
from minifsdp.engine.events import events
from minifsdp.engine.layout import ParamInfo, owned_parameters
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.precision import Precision
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.sharded_param import Options, ShardedParam
from minifsdp.engine.unit import Unit, UnitPolicy, modules_of_unit
from minifsdp.fsdp2.fsdp_state import FSDPState, state_of
from minifsdp.fsdp2.module import FSDPModule, sharded_class
from minifsdp.fsdp2.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Shards ``module``'s parameters, gradients and optimizer state over the ranks of ``mesh``, in place.

    Every rank of the mesh must call it, on modules of the same structure and in the same order.

    Args:
        module: the module, or a list of modules that form one unit. The unit is all-gathered before the first of them
            runs and resharded after the last.
        mesh: a mesh with one dimension to shard over, or with the dimensions (replicate, shard); ``None`` for all
            ranks. Without a default process group, ``None`` first initializes one from the environment that a launcher
            such as torchrun sets.
        reshard_after_forward: ``True`` reshards after forward and all-gathers again for backward; ``False`` keeps the
            parameters unsharded; an integer n reshards to groups of n ranks, which all ranks of the job must create
            together; ``None`` means ``True`` for all modules except the root.
        shard_placement_fn: called with each parameter. Returns ``Shard(dim)``, ``None`` to shard dim 0, or torch's
            ``ShardPlacementResult`` to shard the parameter over another mesh.
        mp_policy: the mixed-precision policy.
        offload_policy: whether shards are stored on the CPU.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: a `DataParallelMeshDims` with the dimensions of ``mesh`` for data parallelism; the parameters are
            DTensors on ``mesh``.

    Returns:
        ``module``.

    Raises:
        NotImplementedError: if an option or a property of a parameter is not supported.
        ValueError: if a module cannot be sharded, the mesh has more than two dimensions, a parameter belongs to another
            unit, or there is neither a default process group nor the environment variables of a launcher (``RANK``...).
        AssertionError: if a module is already sharded.
    """
    shardable.check_options(
        "fully_shard",
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )
    modules: list[nn.Module] = (
        list(module) if isinstance(module, list | tuple) else [module]
    )
    shardable.check_modules(
        modules, "fully_shard", lambda one: state_of(one) is not None
    )
    mesh = mesh if mesh is not None else default_mesh()
    attach()
    shard_modules(
        modules,
        ParamMesh(mesh, _groups_of(mesh))
        if dp_mesh_dims is None
        else FullMesh(mesh, dp_mesh_dims),
        mp_policy,
        offload_policy,
        ignored_params,
        shard_placement_fn,
        reshard_after_forward,
    )
    return module


@dataclass(frozen=True)
class ParamMesh:
    """The mesh of the parameters of one call.

    Attributes:
        mesh: the mesh.
        groups: this rank's groups on it.
        param: creates a parameter on it, with the arguments of `ShardedParam`.
    """

    mesh: DeviceMesh
    groups: MeshGroups
    param: Callable[..., ShardedParam] = ShardedParam


def shard_modules(
    modules: list[nn.Module],
    param_mesh: Any,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: set[nn.Parameter] | None = None,
    placement_fn: Callable[[nn.Parameter], Any] | None = None,
    reshard_after_forward: bool | int | None = None,
    base: type[FSDPModule] = FSDPModule,
) -> None:
    """Does the four steps above. The arguments that are not listed are those of `fully_shard`.

    Args:
        modules: the modules of the unit.
        param_mesh: a `ParamMesh`, or an object with the same attributes.
        base: the class with the methods of the modules.
    """
    # With the index of the current device.
    device = torch.empty(
        0, dtype=torch.uint8, device=param_mesh.mesh.device_type
    ).device
    # 1. Collect in module order. A parameter that is tied inside the unit stays one parameter.
    owners = modules_of_unit(modules, _is_apart)
    parameters = owned_parameters(owners, set(ignored_params or ()))
    ownership.check_free(parameters)
    find_second_places(owners, parameters)
    use_dense_gradients(parameters)
    _move_to(device, owners, parameters)
    params = _sharded_params(parameters, param_mesh, placement_fn)
    compare_while_debugging(params)
    events.sharded(modules_of_unit(modules, lambda one: state_of(one) is not None))
    options = Options(
        device,
        Precision(mp_policy.param_dtype, mp_policy.reduce_dtype),
        offload=isinstance(offload_policy, CPUOffloadPolicy),
        pin=getattr(offload_policy, "pin_memory", False),
        cases=[case(mp_policy) for case in BUCKETS],
    )
    unit = None
    if params:
        unit = _make_unit(modules, parameters, params, options, reshard_after_forward)
    # 3. The state registers the hooks.
    create = next((case for case in STATES if case.takes(modules)), FSDPState)
    state = create(modules, unit, device, mp_policy, reshard_after_forward)
    # 4. Add the methods, the hooks for state dicts, and the registration that libraries read.
    for one in modules:
        one.__class__ = sharded_class(type(one), base)  # type: ignore[arg-type]
    for extend in events.states:
        extend(state)
    torch_registry.register(state, modules, base._name_of_call)


def _groups_of(mesh: DeviceMesh) -> MeshGroups:
    """This rank's shard group and replicate group on the user's mesh, see ``mesh.py``."""
    if mesh.ndim == 1:
        return MeshGroups.sharded(Group.of(mesh.get_group()))
    if mesh.ndim != 2:
        raise ValueError(message("mesh-axes", ndim=mesh.ndim, mesh=mesh))
    return MeshGroups.hybrid(
        shard=Group.of(mesh.get_group(1)), replicate=Group.of(mesh.get_group(0))
    )


def _is_apart(module: nn.Module) -> bool:
    # `replicate` manages the parameters of the modules that it was called on.
    return state_of(module) is not None or "replicate" in module.__dict__.get(
        REGISTRY_KEY, ()
    )


def _move_to(
    device: torch.device,
    owners: list[tuple[str, nn.Module]],
    parameters: dict[nn.Parameter, ParamInfo],
) -> None:
    """Moves parameters and buffers to the compute device, unless they are on the meta device (FS2-15)."""
    buffers = [
        buffer for _, module in owners for buffer in module.buffers(recurse=False)
    ]
    for tensor in (*parameters, *buffers):
        if tensor.device != device and tensor.device.type != "meta":
            # The same tensor object, so that modules that share it still share it.
            tensor.data = tensor.data.to(device)


def _sharded_params(
    parameters: dict[nn.Parameter, ParamInfo],
    param_mesh: Any,
    placement_fn: Callable[[nn.Parameter], Any] | None,
) -> list[ShardedParam]:
    """Chooses for each parameter how it is sharded, and over which mesh."""
    mesh_groups = {param_mesh.mesh: param_mesh.groups}
    found = []
    for parameter, info in parameters.items():
        placement: Any = placement_fn(parameter) if placement_fn else None
        mesh = param_mesh.mesh
        for case in PLACEMENTS:
            placement, mesh = case(placement, mesh, info.path)
        groups = mesh_groups[mesh] = mesh_groups.get(mesh) or _groups_of(mesh)
        shardable.check_parameter(parameter, info.path, placement, groups.num_shards)
        found.append(param_mesh.param(info, parameter, mesh, groups, placement))
    return found


def _make_unit(
    modules: list[nn.Module],
    parameters: dict[nn.Parameter, ParamInfo],
    params: list[ShardedParam],
    options: Options,
    reshard: bool | int | None,
) -> Unit[PerParameterLayout]:
    # 2. The layout takes the values and registers DTensors on the modules.
    layout = PerParameterLayout(params, options)
    keep_grad_dtypes(layout, parameters)
    ownership.take(parameters)
    optimizer_steps.add(layout)
    dtype = options.precision.reduces_in(layout.dtype)
    numbers_on: dict[MeshGroups, list[int]] = {}
    for number, param in enumerate(params):
        numbers_on.setdefault(param.mesh_groups, []).append(number)
    has_one = len(numbers_on) == 1
    plans = [
        ReducePlan.mean(on, dtype, None if has_one else frozenset(own))
        for on, own in numbers_on.items()
    ]
    unit = Unit(
        modules,
        layout,
        plans,
        UnitPolicy(reshard_after_forward=reshard is not False),
    )
    reshard_to_number(unit, reshard)
    return unit


# As for each composable API of PyTorch, ``fully_shard.state(module)`` is the state of a module.
fully_shard.state = state_of  # type: ignore[attr-defined]
