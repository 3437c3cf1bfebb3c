"""Constructor checks, and the choice of process groups and device for ``FullyShardedDataParallel``.

This code runs only at construction, so its checks can be thorough. A wrong argument must raise an error on every rank
*before the first collective*. If one rank stops with an error while the others wait for it, the job appears to hang.

The constructor checks the arguments that do not depend on the model, chooses the mesh, chooses the device, and then
creates the layout. The only collective in these steps creates the groups of a hybrid strategy, if the user passed none.

*In torch:* ``_init_utils.py``, 1236 lines. Passing a string as the strategy raises a bare ``KeyError`` there.

Spec: CTOR-02, CTOR-06 to CTOR-09, CTOR-14, CTOR-17, CTOR-18, PREF-01, HYB-02, HYB-03, HYB-07, HYB-08, DEV-09,
LEGACY-04, WRAP-19.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from minifsdp.checks.attach import attach
from minifsdp.engine import validation
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.mesh import Group, MeshGroups, default_group, node_groups
from minifsdp.engine.messages import message, warn
from minifsdp.engine.unit import Unit
from minifsdp.fsdp1 import policies
from minifsdp.fsdp1.options import CPUOffload, GroupPair, Options, ProcessGroups, ShardingStrategy

# All units of this API use the flat layout.
FlatUnit = Unit[FlatLayout]

HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
RESHARDS_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def check_options(module: Any, options: Options) -> None:
    """Checks the types of the arguments. Nothing is communicated.

    Wrapping a ``ModuleList`` or ``ModuleDict`` is allowed, with a warning (WRAP-19).

    Raises:
        TypeError: if an argument has the wrong type.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(message("not-a-module", type=type(module).__name__))
    strategy = options.sharding_strategy
    if isinstance(strategy, CPUOffload):
        raise TypeError(message("third-position"))
    if not isinstance(strategy, ShardingStrategy | None):
        members = ", ".join(map(str, ShardingStrategy))
        raise TypeError(message("strategy-type", members=members, sharding_strategy=strategy))
    if options.auto_wrap_policy is not None:
        policies.require_policy(options.auto_wrap_policy)
    if validation.is_only_called_in_parts(module):
        # This message, and the one in `strategy_on`, begin with torch's wording, because programs match on it.
        warn(message("wraps-container", type=type(module).__name__))


def strategy_on(mesh: MeshGroups, strategy: ShardingStrategy) -> ShardingStrategy:
    """Returns ``strategy``, or ``NO_SHARD`` with a warning if the shard group has one rank (CTOR-18).

    ``NO_SHARD`` of several ranks is deprecated (SHARD-18). The warnings contain no module name and are always issued
    from the same line, so Python shows each only once.
    """
    if strategy is not ShardingStrategy.NO_SHARD and mesh.shard is None:
        warn(message("nobody-to-shard-with", strategy=strategy))
        return ShardingStrategy.NO_SHARD
    if strategy is ShardingStrategy.NO_SHARD and mesh.replicate is not None:
        warn(message("no-shard-deprecated"), FutureWarning)
    return strategy


def choose_mesh(options: Options, strategy: ShardingStrategy, device: torch.device) -> tuple[MeshGroups, ProcessGroups]:
    """Returns the shard and replicate groups for a strategy, and the process groups to pass to inner units.

    Every rank must call it, because a hybrid strategy creates its groups if the user passed none.

    Raises:
        RuntimeError: if there is no default process group and none was given.
        ValueError: if groups or mesh dimensions do not match the strategy, or group and mesh were both given (NEW-01).
        TypeError: if ``process_group`` is neither a group nor a pair of groups.
    """
    attach()
    given = options.process_group if options.device_mesh is None else _groups_of_mesh(options, strategy)
    if strategy in HYBRID_SHARDING_STRATEGIES:
        pair = _hybrid_groups(given, options, strategy, device)
        return MeshGroups.hybrid(Group.of(pair[0], device), Group.of(pair[1], device)), pair
    if isinstance(given, (tuple, list)):
        raise ValueError(message("pair-of-groups", strategy=strategy.name))
    group = default_group() if given is None else given
    if not _is_group(group):
        raise TypeError(message("group-type", process_group=group))
    mesh_of = MeshGroups.replicated if strategy is ShardingStrategy.NO_SHARD else MeshGroups.sharded
    return mesh_of(Group.of(group, device)), group


def _groups_of_mesh(options: Options, strategy: ShardingStrategy) -> Any:
    """The process group of a ``DeviceMesh``, or its pair of groups for a hybrid strategy."""
    mesh, num_axes = options.device_mesh, 2 if strategy in HYBRID_SHARDING_STRATEGIES else 1
    if options.process_group is not None:
        raise ValueError(message("group-and-mesh"))
    if mesh.ndim != num_axes:
        raise ValueError(message("mesh-ndim", strategy=strategy.name, num_axes=num_axes, device_mesh=mesh))
    return mesh.get_group() if num_axes == 1 else (mesh.get_group(1), mesh.get_group(0))


def _hybrid_groups(given: Any, options: Options, strategy: ShardingStrategy, device: torch.device) -> GroupPair:
    """The given shard and replicate groups, or those of the nodes."""
    if given is None:
        default_group()
        if options.auto_wrap_policy is None:
            raise ValueError(message("hybrid-by-hand", strategy=strategy.name))
        return node_groups(device)
    pair = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(pair) != 2 or not all(map(_is_group, pair)):
        raise ValueError(message("hybrid-groups", strategy=strategy.name, process_group=given))
    return pair[0], pair[1]


def _is_group(candidate: Any) -> bool:
    # Check for methods instead of the class, because groups for simulations may not derive from torch's class.
    return all(callable(getattr(candidate, method, None)) for method in ("rank", "size"))


def compute_device(module: nn.Module, device_id: Any, ignored: Collection[nn.Parameter] = ()) -> torch.device:
    """The first of these that exists: ``device_id``, the module's accelerator, the current accelerator, the CPU.

    Parameters in ``ignored`` can be on any device.

    Raises:
        TypeError: if ``device_id`` is neither an index nor a device of this machine.
        ValueError: if ``device_id`` is the meta device, or not the accelerator that the module is on.
        RuntimeError: if the module's parameters are on several devices.
    """
    found = {p.device for p in module.parameters() if p.device.type != "meta" and p not in ignored}
    accelerators = {device for device in found if device.type != "cpu"}
    if len(accelerators) > 1 or (accelerators and len(found) > 1 and device_id is None):
        raise RuntimeError(message("several-devices", devices=sorted(map(str, found))))
    if device_id is None:
        return next(iter(accelerators)) if accelerators else _current_device()
    device = _as_device(device_id)
    if accelerators and accelerators != {device}:
        raise ValueError(message("other-device", device=device, accelerator=next(iter(accelerators))))
    return device


def _as_device(device_id: Any) -> torch.device:
    try:
        device = torch.device(device_id)
    except (TypeError, RuntimeError) as error:
        raise TypeError(message("device-type", device_id=device_id)) from error
    if device.type == "meta" and not hasattr(torch, "meta"):  # only the step simulator registers this device module
        raise ValueError(message("device-meta"))
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device.index is None:
        warn(message("device-without-index", device_id=device_id))
        return _with_current_index(device)
    return device


def _current_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else _with_current_index(accelerator)


def _with_current_index(device: torch.device) -> torch.device:
    return torch.device(device.type, torch.get_device_module(device).current_device())


def flattened_in(modules: list[tuple[str, nn.Module]]) -> set[nn.Parameter]:
    """The parameters on ``modules`` that belong to units that were created earlier."""
    found = [(module, name, p) for _, module in modules for name, p in module._parameters.items() if p is not None]
    return {parameter for module, name, parameter in found if validation.is_flattened(module, name)}
