"""Where the first values come from: the meta device, the move to the compute device, and rank 0.

Before a unit is cut into shards its parameters must be real, in the right place, and, if so wished, equal on all ranks.
Three steps, each for the modules of one unit only, so that the whole model is never in full size on a device:

1. *materialize*: modules that were built on the meta device have shapes and no memory. They are given memory and their
   own ``reset_parameters()`` is called, or the user's ``param_init_fn`` does both. A module initialises the tensors
   that it owns directly and nothing below it, so that nothing is initialised twice, and a module that has real values
   already is not touched.
2. *move*: to the compute device, if ``device_id`` says which. If it does not, and the module is on the CPU while an
   accelerator computes, the unit is cut on the CPU and only its shards go over; that is slower, and worth a warning.
3. *synchronize*: what rank 0 has is sent to all. Without it each rank keeps what it drew; with shards that means one
   model stitched together from several random ones, harmless only if all ranks used the same seed.

*In torch:* ``_materialize_meta_module``, ``_move_module_to_device`` and ``_sync_module_params_and_buffers`` in
``_init_utils.py``. The first resets all modules of the tree there, also those that were not on the meta device.

Spec: DEV-03 to DEV-06, META-01 to META-11, SYNC-01 to SYNC-05.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from minifsdp import trace
from minifsdp.engine import collectives
from minifsdp.engine.mesh import Mesh
from minifsdp.engine.messages import message, warn
from minifsdp.engine.partition import local_part

Modules = Sequence[tuple[str, nn.Module]]


def _own_tensors(module: nn.Module, ignored: set[nn.Parameter]) -> list[torch.Tensor]:
    parameters = [p for p in module._parameters.values() if p is not None and p not in ignored]
    return [*parameters, *(b for b in module._buffers.values() if b is not None)]


def materialize(modules: Modules, param_init_fn: Any, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """1. Gives memory and values to those of the unit's modules that own tensors on the meta device.

    Raises:
        ValueError: ``param_init_fn`` is needed and not callable.
        RuntimeError: a module has no ``reset_parameters()``, or is still on the meta device afterwards.
    """
    on_meta = [(path, m) for path, m in modules if any(t.is_meta for t in _own_tensors(m, ignored))]
    if on_meta and param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(message("init-fn-type", param_init_fn=param_init_fn))
    on_meta = on_meta or _deferred(modules, ignored)
    for path, module in on_meta:
        if param_init_fn is not None:
            param_init_fn(module)
        else:
            _reset(path, module, device)
        left = [
            name for name, t in [*module._parameters.items(), *module._buffers.items()] if t is not None and t.is_meta
        ]
        if left:
            raise RuntimeError(message("init-fn-left-meta", left=left, path=path, type=type(module).__name__))


def _deferred(modules: Modules, ignored: set[nn.Parameter]) -> list[tuple[str, nn.Module]]:
    """The modules that torchdistX has built without memory, if it is installed; nothing else tells them (META-09)."""
    try:
        fake: Any = importlib.import_module("torchdistx.fake")
    except ImportError:
        return []
    return [(path, m) for path, m in modules if any(fake.is_fake(t) for t in _own_tensors(m, ignored))]


def _reset(path: str, module: nn.Module, device: torch.device) -> None:
    if not any(t.is_meta for t in _own_tensors(module, set())):
        importlib.import_module("torchdistx.deferred_init").materialize_module(module)
        return
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
    if reset is None:
        raise RuntimeError(message("no-reset-parameters", path=path, type=type(module).__name__))
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        reset()


def move_modules(modules: Modules, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """2. Moves the parameters and buffers of the unit's modules, in place; parameters stay the same objects."""
    for _, module in modules:
        for tensor in _own_tensors(module, ignored):
            _move(tensor, device)


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        tensor.data = tensor.data.to(device)


def cut_in_place(modules: Modules, device: torch.device, ignored: set[nn.Parameter], *, sends: bool) -> None:
    """2. Without ``device_id``: the unit will be cut where its modules are; only buffers are moved (DEV-03, SYNC-04).

    Args:
        modules: the unit's modules with their paths.
        device: the compute device.
        ignored: parameters to be left alone.
        sends: whether rank 0's values are to be sent; an accelerator's network does not carry what is on the CPU.

    Raises:
        ValueError: ``sends``, and something is on the CPU that is not the compute device.
    """
    left = [t for _, module in modules for t in _own_tensors(module, ignored) if t.device.type == "cpu"]
    if device.type == "cpu" or not left:
        return
    where = f"the module is on the CPU and {device} computes"
    if sends:
        raise ValueError(message("sync-on-cpu", where=where))
    warn(message("slow-on-cpu", where=where))
    for buffer in left:
        if not isinstance(buffer, nn.Parameter):
            _move(buffer, device)


def synchronize(modules: Modules, mesh: Mesh, ignored: set[nn.Parameter], unit_name: str) -> None:
    """3. Every rank gets the first rank's values of the unit's parameters and buffers. Every rank must call it.

    All tensors of one dtype travel in one broadcast. A buffer that several units see is sent with the first.
    """
    tensors: dict[int, torch.Tensor] = {}
    for _, module in modules:
        for tensor in _own_tensors(module, ignored):
            if not getattr(tensor, "_is_synchronized", False):
                tensors[id(tensor)] = tensor
    for dtype in dict.fromkeys(t.dtype for t in tensors.values()):
        _broadcast([local_part(t.detach()) for t in tensors.values() if t.dtype is dtype], mesh, unit_name)
    for tensor in tensors.values():
        if not isinstance(tensor, nn.Parameter):
            tensor._is_synchronized = True  # type: ignore[attr-defined]


def _broadcast(tensors: list[torch.Tensor], mesh: Mesh, unit_name: str) -> None:
    row = torch.cat([t.reshape(-1) for t in tensors])
    # First to its replicas, then from each of them to their shard groups: the first rank of all is everybody's source.
    for group in (mesh.replicate, mesh.shard):
        if group is not None:
            if trace.recorder is not None:
                num_bytes = row.numel() * row.element_size()
                trace.recorder.begin("BCAST", unit_name, num_bytes=num_bytes, ranks=group.ranks, dtype=row.dtype)
            collectives.broadcast(group, row)
    for tensor, values in zip(tensors, row.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
