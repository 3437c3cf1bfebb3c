"""``fully_shard``: shards a module in place.

::

    for block in model.blocks:
        fully_shard(block)              # one unit for each block
    fully_shard(model)                  # and one for what is left
    optimizer = torch.optim.Adam(model.parameters())

Nothing is wrapped. The call

1. takes the parameters of the module that no call inside has taken,
2. replaces each by a ``DTensor`` that holds this rank's rows of it,
3. and puts two hooks on the module, see ``fsdp_state.py``.

What else a call does, such as giving the module a class with more methods, is attached from outside: `state_class`.

Inner modules first, the root last: a unit consists of what is left when the call is made.

*In torch:* ``_fully_shard.py`` and ``_fsdp_init.py``.

Spec: FS2-01 to FS2-25, NEW-04, NEW-05, NEW-16, NEW-23.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifsdp.engine import misuse
from minifsdp.engine.dtensors import Sharding
from minifsdp.engine.layout import OwnedParameter, owned_parameters
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.precision import Precision
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.row import Options
from minifsdp.engine.unit import Resting, Unit, UnitPolicy, modules_of_unit
from minifsdp.fsdp2.fsdp_state import FSDPState, state_of
from minifsdp.fsdp2.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from minifsdp.fsdp2.reshard import choose_reshard, smaller_mesh

_NO_POLICY = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()
# Attached from outside, see ``minifsdp/__init__.py``: what a call makes, `FSDPState` or a child of it that does more,
# and functions that look at the parameters, how they will be cut, and the device, before they are cut.
state_class: type[FSDPState] = FSDPState
before_cut: list[Callable[[dict[nn.Parameter, OwnedParameter], list[Sharding], torch.device], None]] = []

M = TypeVar("M", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _NO_POLICY,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Shards ``module``'s parameters, gradients and optimizer state over the ranks of ``mesh``, in place.

    Every rank of the mesh must call it, on modules of the same structure and in the same order.

    Args:
        module: the module, or several that shall be one unit, gathered before the first of them runs and freed after
            the last.
        mesh: one axis to shard over, or two, (replicate, shard); ``None`` for all ranks. Without a default
            process group, ``None`` first initializes one from the environment that a launcher such as torchrun sets.
        reshard_after_forward: ``True`` frees after forward and gathers again for backward; ``False`` keeps; a number
            keeps one copy for so many ranks; ``None`` means ``True`` for all but the root.
        shard_placement_fn: gives for a parameter ``Shard(dim)``, or ``None`` for its first dim, or torch's
            ``ShardPlacementResult`` to cut it over another mesh than the others.
        mp_policy: which dtype at which step.
        offload_policy: whether shards live on the CPU.
        ignored_params: parameters to be left alone.
        dp_mesh_dims: not offered.

    Returns:
        ``module``.

    Raises:
        ValueError: a module that cannot be sharded, a mesh of more than two axes, a parameter of another unit, or no
            default process group and an environment without ``RANK`` and the other variables of a launcher.
        AssertionError: a module that is sharded already.
    """
    if dp_mesh_dims is not None:
        raise NotImplementedError(message("dp-mesh-dims"))
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    if wrong := [one for one in modules if not isinstance(one, nn.Module)]:
        raise TypeError(message("fully-shard-type", wrong=wrong[0]))
    _check_modules(modules)
    mesh = mesh if mesh is not None else _default_mesh()
    device = _device_of(mesh)
    # 1. In the order of the modules; ties inside of the unit stay one parameter.
    owners = modules_of_unit(modules, _is_apart)
    parameters = owned_parameters(owners, set(ignored_params or ()))
    _move_to(device, owners, parameters)
    shardings = _shardings(parameters, mesh, shard_placement_fn)
    for look in before_cut:
        look(parameters, shardings, device)
    # 2. Values are taken, DTensors are shown.
    unit = None
    if parameters:
        options = _options(device, mp_policy, offload_policy)
        layout = PerParameterLayout(parameters, shardings, options)
        frees = reshard_after_forward is None or reshard_after_forward
        unit = _make_unit(modules[0], layout, options.precision, shardings[0].mesh, frees)
    # 3. The state lays the hooks.
    state_class(modules, unit, device, mp_policy, reshard_after_forward)
    return module


def _check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError(message("no-modules"))
    for module in modules:
        # In a list of several, the others gather for it.
        if len(modules) == 1 and misuse.is_only_called_in_parts(module):
            raise ValueError(message("no-forward", type=type(module).__name__))
        if state_of(module) is not None:
            raise AssertionError(message("sharded-twice", type=type(module).__name__))
        misuse.check_one_door(module, "fully_shard")
    inside = [one for one in modules for other in modules if other is not one and one in set(other.modules())]
    if inside:
        raise ValueError(message("nested-in-list", type=type(inside[0]).__name__))


def _default_mesh() -> DeviceMesh:
    if not torch.distributed.is_initialized():
        try:
            torch.distributed.init_process_group()
        except ValueError as error:
            raise ValueError(message("no-launcher", error=error)) from error
    # A build for GPUs names its accelerator also where there is none.
    device = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(device.type if device is not None else "cpu", (torch.distributed.get_world_size(),))


def _table(mesh: DeviceMesh) -> Mesh:
    """This rank's groups on the user's mesh, see ``mesh.py``."""
    if mesh.ndim == 1:
        return Mesh.sharded(Group.of(mesh.get_group()))
    if mesh.ndim != 2:
        raise ValueError(message("mesh-axes", ndim=mesh.ndim, mesh=mesh))
    return Mesh.hybrid(shard=Group.of(mesh.get_group(1)), replicate=Group.of(mesh.get_group(0)))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _is_apart(module: nn.Module) -> bool:
    # What `replicate` has taken belongs to it.
    return state_of(module) is not None or "replicate" in module.__dict__.get(REGISTRY_KEY, ())


def _move_to(
    device: torch.device, owners: list[tuple[str, nn.Module]], parameters: dict[nn.Parameter, OwnedParameter]
) -> None:
    """Values and buffers on the compute device, unless they are on none yet (FS2-15)."""
    for parameter in parameters:
        if parameter.device != device and parameter.device.type != "meta":
            with torch.no_grad():
                parameter.data = parameter.data.to(device)
    for _, module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def _shardings(
    parameters: dict[nn.Parameter, OwnedParameter],
    mesh: DeviceMesh,
    placement_fn: Callable[[nn.Parameter], Any] | None,
) -> list[Sharding]:
    """How each is cut, and over whom."""
    tables = {mesh: _table(mesh)}
    found = []
    for parameter, owned in parameters.items():
        placement: Any = placement_fn(parameter) if placement_fn else None
        own_mesh = mesh
        if hasattr(placement, "mesh_info"):
            placement, own_mesh = placement.placement, _mesh_of(placement.mesh_info, owned.path)
        if own_mesh not in tables:
            tables[own_mesh] = _table(own_mesh)
        found.append(Sharding(parameter, own_mesh, tables[own_mesh], placement, owned.path))
    return found


def _mesh_of(info: Any, path: str) -> DeviceMesh:
    mesh: DeviceMesh = info.mesh
    axes = (info.shard_mesh_dim,) if info.replicate_mesh_dim is None else (info.replicate_mesh_dim, info.shard_mesh_dim)
    if axes != tuple(range(mesh.ndim)):
        raise ValueError(message("placement-mesh", path=path, ndim=mesh.ndim, axes=axes))
    return mesh


def _options(device: torch.device, mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy | None) -> Options:
    offload = isinstance(offload_policy, CPUOffloadPolicy)
    pin = isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory
    return Options(device, Precision(mp_policy.param_dtype, mp_policy.reduce_dtype), offload, pin, mp_policy)


def _make_unit(
    module: nn.Module, layout: PerParameterLayout, precision: Precision, mesh: DeviceMesh, reshard: bool | int
) -> Unit:
    plans = tuple(ReducePlan.mean(table, precision.reduces_in(layout.dtype)) for table in layout.meshes)
    unit = Unit(module, layout, plans, precision, UnitPolicy(reshard_after_forward=True))
    num_ranks = choose_reshard(unit, reshard)
    if num_ranks is not None:
        small = smaller_mesh(mesh, num_ranks)
        begin = functools.partial(layout.rest, Group.of(small.get_group(1)), small)
        unit.choose(resting=Resting(begin, layout.wake))
    return unit


fully_shard.state = state_of  # type: ignore[attr-defined]
