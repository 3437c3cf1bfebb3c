"""Constructor checks, and the choice of process groups and device for ``FullyShardedDataParallel``.

This code runs only at construction, so its checks can be thorough. A wrong argument must raise an error on every rank
*before the first collective*. If one rank stops with an error while the others wait for it, the job appears to hang.

The constructor checks the arguments that do not depend on the model, chooses the mesh, chooses the device, and then
creates the layout. The only collective in these steps creates the groups of a hybrid strategy, if the user passed none.

Other code can manage a part of the model, for example an embedding that another library shards, a frozen tower on one
device, or an expert that only this rank has. The user lists this part, and the unit around it ignores it: the unit does
not flatten or communicate its parameters, and does not reduce their gradients. Ignoring a module ignores all its
submodules, except inner wrappers. The user created such a wrapper explicitly, so it still shards its parameters.

*In torch:* ``_init_utils.py``, 1236 lines. Passing a string as the strategy raises a bare ``KeyError`` there.

Spec: CTOR-02, CTOR-06 to CTOR-09, CTOR-14, CTOR-17, CTOR-18, PREF-01, HYB-02, HYB-03, HYB-07, HYB-08, DEV-09,
IGN-01 to IGN-12, LEGACY-04, WRAP-19.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from minifsdp.cases.node_groups import node_groups
from minifsdp.checks import arguments
from minifsdp.checks.attach import attach
from minifsdp.engine.exchange import use_device
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.mesh import Group, MeshGroups, default_group
from minifsdp.engine.messages import message, warn
from minifsdp.engine.unit import Unit, modules_of_unit
from minifsdp.fsdp1.options import CPUOffload, ShardingStrategy
from minifsdp.fsdp1.wrap import require_policy

# All units of this API use the flat layout.
FlatUnit = Unit[FlatLayout]

HYBRID_SHARDING_STRATEGIES = [
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
]
RESHARDS_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def check_arguments(module: Any, strategy: Any, policy: Any) -> None:
    """Checks the types of three arguments. Nothing is communicated.

    Wrapping a ``ModuleList`` or ``ModuleDict`` is allowed, with a warning (WRAP-19).

    Raises:
        TypeError: if an argument has the wrong type.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(message("not-a-module", type=type(module).__name__))
    if isinstance(strategy, CPUOffload):
        raise TypeError(message("third-position"))
    if not isinstance(strategy, ShardingStrategy | None):
        members = ", ".join(map(str, ShardingStrategy))
        raise TypeError(
            message("strategy-type", members=members, sharding_strategy=strategy)
        )
    if policy is not None:
        require_policy(policy)
    if arguments.is_only_called_in_parts(module):
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


def choose_mesh(
    process_group: Any,
    device_mesh: Any,
    strategy: ShardingStrategy,
    device: torch.device,
    *,
    has_policy: bool,
) -> tuple[MeshGroups, Any]:
    """Returns the shard and replicate groups for a strategy, and the process groups to pass to inner units.

    Every rank must call it, because a hybrid strategy creates its groups if the user passed none.

    Args:
        process_group: the user's process group or pair of groups, or ``None``.
        device_mesh: the user's mesh instead of groups, or ``None``.
        strategy: the strategy.
        device: the compute device.
        has_policy: whether an auto-wrap policy passes the groups to inner units.

    Raises:
        RuntimeError: if there is no default process group and none was given.
        ValueError: if the groups or the dimensions of the mesh do not match the strategy, or both were given (NEW-01).
        TypeError: if ``process_group`` is neither a group nor a pair of groups.
    """
    is_hybrid = strategy in HYBRID_SHARDING_STRATEGIES
    if device_mesh is not None:
        num_axes = 2 if is_hybrid else 1
        if process_group is not None:
            raise ValueError(message("group-and-mesh"))
        if device_mesh.ndim != num_axes:
            raise ValueError(
                message(
                    "mesh-ndim",
                    strategy=strategy.name,
                    num_axes=num_axes,
                    device_mesh=device_mesh,
                )
            )
        process_group = (
            (device_mesh.get_group(1), device_mesh.get_group(0))
            if is_hybrid
            else device_mesh.get_group()
        )
    attach()
    is_pair = isinstance(process_group, (tuple, list))
    if is_hybrid:
        if process_group is None:
            default_group()
            if not has_policy:
                raise ValueError(message("hybrid-by-hand", strategy=strategy.name))
            process_group = node_groups(device)
        elif (
            not is_pair
            or len(process_group) != 2
            or not all(map(_is_group, process_group))
        ):
            raise ValueError(
                message(
                    "hybrid-groups", strategy=strategy.name, process_group=process_group
                )
            )
        for one in process_group:
            use_device(one, device)
        return MeshGroups.hybrid(*map(Group.of, process_group)), tuple(process_group)
    if is_pair:
        raise ValueError(message("pair-of-groups", strategy=strategy.name))
    group = default_group() if process_group is None else process_group
    if not _is_group(group):
        raise TypeError(message("group-type", process_group=group))
    mesh_of = (
        MeshGroups.replicated
        if strategy is ShardingStrategy.NO_SHARD
        else MeshGroups.sharded
    )
    use_device(group, device)
    return mesh_of(Group.of(group)), group


def _is_group(candidate: Any) -> bool:
    # Check for methods instead of the class, because groups for simulations may not derive from torch's class.
    return all(
        callable(getattr(candidate, method, None)) for method in ("rank", "size")
    )


def compute_device(
    module: nn.Module, device_id: Any, ignored: Collection[nn.Parameter] = ()
) -> torch.device:
    """The first of these that exists: ``device_id``, the module's accelerator, the current accelerator, the CPU.

    Parameters in ``ignored`` can be on any device.

    Raises:
        TypeError: if ``device_id`` is neither an index nor a device of this machine.
        ValueError: if ``device_id`` is the meta device, or not the accelerator that the module is on.
        RuntimeError: if the module's parameters are on several devices.
    """
    found = {
        p.device
        for p in module.parameters()
        if p.device.type != "meta" and p not in ignored
    }
    accelerators = {device for device in found if device.type != "cpu"}
    if len(accelerators) > 1 or (accelerators and len(found) > 1 and device_id is None):
        raise RuntimeError(message("several-devices", devices=sorted(map(str, found))))
    if device_id is None:
        device = (
            next(iter(accelerators), None)
            or torch.accelerator.current_accelerator(check_available=True)
            or torch.device("cpu")
        )
    else:
        try:
            device = torch.device(device_id)
        except (TypeError, RuntimeError) as error:
            raise TypeError(message("device-type", device_id=device_id)) from error
        # Only the step simulator registers a device module of the meta device.
        if device.type == "meta" and not hasattr(torch, "meta"):
            raise ValueError(message("device-meta"))
    if device.type in ("cpu", "meta"):
        # They have no index.
        device = torch.device(device.type)
    elif device.index is None:
        if device_id is not None:
            warn(message("device-without-index", device_id=device_id))
        index = torch.get_device_module(device).current_device()
        device = torch.device(device.type, index)
    if accelerators and accelerators != {device}:
        raise ValueError(
            message("other-device", device=device, accelerator=next(iter(accelerators)))
        )
    return device


# ---- ignored modules and parameters ---------------------------------------------------------------------------------


class WrongElementsError(TypeError, ValueError):
    """An element of a list has the wrong type. Programs for torch's FSDP catch either of the base classes."""


def find_ignored(
    module: nn.Module,
    ignored_modules: Any,
    ignored_states: Any,
    is_wrapper: Callable[[nn.Module], bool],
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Returns the modules and parameters that the wrapper around ``module`` ignores. Nothing is communicated.

    Raises:
        ValueError: if both arguments were given, an element is a wrapper, or parameters and modules are mixed.
        TypeError: if an argument is not iterable or has an element of another type.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(message("ignored-both"))
    for argument, given in (
        ("ignored_modules", ignored_modules),
        ("ignored_states", ignored_states),
    ):
        if not isinstance(given, Iterable | None):
            kind = type(given).__name__
            raise TypeError(
                message("ignored-not-iterable", argument=argument, type=kind)
            )
    roots = [] if ignored_modules is None else list(ignored_modules)
    states = [] if ignored_states is None else list(ignored_states)
    if not _all_are(nn.Module, roots):
        raise WrongElementsError(message("ignored-modules-type", types=_types(roots)))
    if _all_are(nn.Module, states):
        roots = [*roots, *states]
        states = []
    elif not _all_are(nn.Parameter, states):
        raise WrongElementsError(message("ignored-states-type", types=_types(states)))
    if any(map(is_wrapper, roots)):
        raise ValueError(message("ignored-wrapper"))
    modules = {inner for _, inner in modules_of_unit(roots, is_wrapper)}
    if module in modules:
        warn(message("ignored-all", type=type(module).__name__))
    return modules, {
        *states,
        *(
            parameter
            for inner in modules
            for parameter in inner.parameters(recurse=False)
        ),
    }


def _all_are(cls: type, given: list[Any]) -> bool:
    return all(isinstance(item, cls) for item in given)


def _types(given: list[Any]) -> list[type]:
    return sorted({type(item) for item in given}, key=repr)
