"""Initial values: materialization from the meta device, the move to the compute device, and the broadcast from rank 0.

Before a unit is sharded, its parameters must have values, be on the right device and, if requested, be equal on all
ranks. Each of the three steps handles the modules of one unit only, so a device never holds the whole unsharded model:

1. *materialize*: modules that were built on the meta device have shapes but no memory. They get memory, and their own
   ``reset_parameters()`` is called. If the user passes ``param_init_fn``, it does both. It is then called for each
   module of the unit, outer modules first, also for modules that own no tensors. A function that initializes only the
   tensors that a module owns directly initializes each tensor once. Modules that already have values are not changed.
   If several modules share a parameter, it gets memory once and stays shared; otherwise each module would train a copy.
2. *move*: modules move to ``device_id``, if it is given. Otherwise, if the module is on the CPU and the compute device
   is an accelerator, the unit is sharded on the CPU and only its shards move. This is slower, so it causes a warning.
3. *synchronize*: rank 0 broadcasts its values. Without this step, each rank keeps its own random values, and the shards
   form a mix of several models, unless all ranks use the same seed.

*In torch:* ``_materialize_meta_module``, ``_move_module_to_device`` and ``_sync_module_params_and_buffers`` in
``_init_utils.py``. There, the first function also initializes modules of the unit that have values, and replaces them.

Spec: DEV-03 to DEV-06, META-01 to META-11, SYNC-01 to SYNC-05.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from minifsdp.cases import torchdistx
from minifsdp.engine.events import events
from minifsdp.engine.exchange import broadcast
from minifsdp.engine.flat_params import is_flattened
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, warn
from minifsdp.engine.shards import local_tensor

Modules = Sequence[tuple[str, nn.Module]]


def _own_tensors(module: nn.Module, ignored: set[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters that are not ignored and not in a unit that was created earlier, and the buffers."""
    parameters = (
        p
        for name, p in module.named_parameters(recurse=False)
        if p not in ignored and not is_flattened(module, name)
    )
    return [*parameters, *module.buffers(recurse=False)]


def _tensors_of(modules: Modules, ignored: set[nn.Parameter]) -> list[torch.Tensor]:
    """Every tensor once, in order."""
    return list(
        dict.fromkeys(
            tensor for _, module in modules for tensor in _own_tensors(module, ignored)
        )
    )


def materialize(
    modules: Modules,
    param_init_fn: Any,
    device: torch.device,
    ignored: set[nn.Parameter],
) -> None:
    """1. Allocates and initializes the unit's modules, if some own tensors on the meta device.

    Raises:
        ValueError: if ``param_init_fn`` is needed and not callable.
        RuntimeError: if a module has no ``reset_parameters()``, or is still on the meta device afterwards.
    """
    # A recording (``minifsdp_tools/simulate/device.py``) computes on the meta device.
    tensors_of = partial(_own_tensors, ignored=ignored)
    on_meta: Modules = [
        (path, module)
        for path, module in modules
        if any(
            tensor.is_meta and tensor.device != device for tensor in tensors_of(module)
        )
    ]
    if on_meta and param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(message("init-fn-type", param_init_fn=param_init_fn))
    on_meta = on_meta or torchdistx.without_memory(modules, tensors_of)
    if not on_meta:
        return
    owners = {module for _, module in on_meta}
    # By level, as torch initializes them, so that equal seeds give equal values.
    paths = {module: path for path, module in modules}
    by_level = [modules[0][1]]
    for module in by_level:
        by_level += [
            child
            for child in module.children()
            if child in paths and child not in by_level
        ]
    for module in by_level:
        # `param_init_fn` can initialize the tensors of a container, which owns none.
        is_container = not [
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
        ]
        if module in owners or (is_container and param_init_fn is not None):
            _initialize(paths[module], module, param_init_fn, device, ignored)
    for path, module in on_meta:
        tensors = [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]
        if left := [name for name, tensor in tensors if tensor.is_meta]:
            raise RuntimeError(
                message(
                    "init-fn-left-meta",
                    left=left,
                    path=path,
                    type=type(module).__name__,
                )
            )


def _initialize(
    path: str,
    module: nn.Module,
    param_init_fn: Any,
    device: torch.device,
    ignored: set[nn.Parameter],
) -> None:
    # An initialization may be recursive.
    on_meta = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for owner, name, parameter in on_meta:
        # Allocation replaces a parameter object, so a parameter that another module shares may already have a new
        # object.
        if hasattr(parameter, "_materialized"):
            setattr(owner, name, parameter._materialized)
    is_owner = any(owner is module for owner, _, _ in on_meta)
    if is_owner and not any(t.is_meta for t in _own_tensors(module, ignored)):
        return
    if param_init_fn is not None:
        param_init_fn(module)
    elif not any(t.is_meta for t in _own_tensors(module, set())):
        torchdistx.materialize(module)
    else:
        reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
        if reset is None:
            raise RuntimeError(
                message("no-reset-parameters", path=path, type=type(module).__name__)
            )
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()
    for owner, name, parameter in on_meta:
        if owner._parameters[name] is not parameter:
            parameter._materialized = owner._parameters[name]  # type: ignore[attr-defined]


def current(parameters: set[nn.Parameter]) -> set[nn.Parameter]:
    """``parameters``, and the ones that have replaced them when they got memory."""
    return parameters | {
        p._materialized for p in parameters if hasattr(p, "_materialized")
    }


def move_modules(
    modules: Modules,
    device: torch.device,
    ignored: set[nn.Parameter],
    *,
    has_device_id: bool,
    sends: bool,
) -> None:
    """2. Moves the parameters and buffers of the unit's modules in place. Parameters stay the same objects.

    Without ``device_id``, only buffers move: the unit is sharded on its modules' device (DEV-03, SYNC-04).

    Args:
        modules: the unit's modules with their paths.
        device: the compute device.
        ignored: parameters to ignore.
        has_device_id: whether the user passed ``device_id``.
        sends: whether rank 0 broadcasts its values. The accelerator's backend cannot send CPU tensors.

    Raises:
        ValueError: if ``sends`` is set and a tensor stays on the CPU, but the compute device is an accelerator.
    """
    tensors = _tensors_of(modules, ignored)
    if not has_device_id:
        on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if device.type == "cpu" or not on_cpu:
            return
        where = f"the module is on the CPU and {device} computes"
        if sends:
            raise ValueError(message("sync-on-cpu", where=where))
        warn(message("slow-on-cpu", where=where))
        tensors = [one for one in on_cpu if not isinstance(one, nn.Parameter)]
    for tensor in tensors:
        _move(tensor, device)


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        tensor.data = tensor.data.to(device)


def synchronize(
    modules: Modules, mesh: MeshGroups, ignored: set[nn.Parameter], unit_name: str
) -> None:
    """3. Broadcasts the unit's parameters and buffers from the first rank. Every rank must call it.

    One broadcast sends all tensors of one dtype. A buffer that several units share is sent only with the first unit.
    """
    tensors = [
        one
        for one in _tensors_of(modules, ignored)
        if not getattr(one, "_is_synchronized", False)
    ]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [local_tensor(t.detach()) for t in tensors if t.dtype is dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        # Broadcast first over the replicate group, then over each shard group, so all values come from the first rank.
        for group in (mesh.replicate, mesh.shard):
            if group is not None:
                if events.recorder is not None:
                    events.recorder.begin(
                        "BCAST",
                        unit_name,
                        num_bytes=flat.nbytes,
                        ranks=group.ranks,
                        dtype=dtype,
                    )
                broadcast(group, flat)
        sizes = [tensor.numel() for tensor in same]
        for tensor, values in zip(same, flat.split(sizes), strict=True):
            tensor.copy_(values.view_as(tensor))
    for tensor in tensors:
        if not isinstance(tensor, nn.Parameter):
            tensor._is_synchronized = True  # type: ignore[attr-defined]
