"""Tensors that a saved dict shares with the model, until the model is about to change them.

Buffers and ignored parameters belong to no unit, so nothing has to be gathered to save them. A copy would cost memory
for nothing, since most dicts are written and dropped before the next step. The dict is given the model's memory, as by
any ``nn.Module``. If the caller still has it when values are about to change, the *model* moves to new memory::

    saved = model.state_dict()      saved["norm.running_mean"] --+
                                    model.norm.running_mean -----+--> 1.0
    model(batch)                    saved["norm.running_mean"] -----> 1.0
                                    model.norm.running_mean --------> 1.0, and soon 1.1

What lies in the model's memory and cannot be shared in this way, such as a view of a part, is copied at once.

It is the model that moves, for a thread may be writing the dict to a disk. Values are about to change when a wrapper of
the model runs forward, an optimizer steps, or a state is loaded. Until then there are a few hooks, and none in a step
after which nothing was saved. Whoever changes such a tensor by hand changes what was saved.

*In torch:* shared for good; running statistics in a dict that is kept go on with the training.

Spec: SD-FULL-07.
"""

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from minifsdp.checkpoint.chunks import on_this_rank
from minifsdp.checkpoint.names import keys_below

_shared: list[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = []
_hooks: list[RemovableHandle] = []


def _memory_of(tensor: torch.Tensor) -> int | None:
    """What tells one piece of memory from another; ``None`` for all tensors that do not say, as sparse ones."""
    try:
        return on_this_rank(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def keep_apart(
    state: MutableMapping[str, Any], prefix: str, own: Iterable[torch.Tensor], may_share: Iterable[torch.Tensor] = ()
) -> None:
    """Gives every tensor below ``prefix`` that lies in the model's memory its own, also one in a list or a dict.

    Args:
        state: a dict of which part or all is below ``prefix``.
        prefix: the beginning of its keys.
        own: tensors of the model.
        may_share: those of them whose memory the dict may have until `part`.
    """
    memory = set(map(_memory_of, own))
    shareable = {_memory_of(tensor): tensor for tensor in may_share}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        where = _memory_of(tensor)
        twin = None if where is None else shareable.get(where)
        # Both must be all that is in that memory: of a part the rest would be saved as well, or stay with the model.
        if twin is not None and tensor is not twin and tensor.nbytes == twin.nbytes == twin.untyped_storage().nbytes():
            _shared.append((weakref.ref(tensor), weakref.ref(twin)))
            return tensor
        return tensor.detach().clone() if where in memory else tensor

    for key in keys_below(state, prefix):
        state[key] = tree_map_only(torch.Tensor, apart, state[key])


def watch(wrappers: Iterable[nn.Module]) -> None:
    """Lets the next forward of any of these, or the next step of any optimizer, begin with `part`."""
    _shared[:] = [pair for pair in _shared if pair[0]() is not None]
    if not _shared:
        return
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(part))
    # A program may save often between two forwards.
    fresh = [wrapper for wrapper in wrappers if part not in wrapper._forward_pre_hooks.values()]
    _hooks.extend(wrapper.register_forward_pre_hook(part) for wrapper in fresh)


def part(*called_with: Any) -> None:
    """Gives the model memory of its own wherever a dict that is still there lies in it."""
    # PyTorch iterates over the hooks of steps while one runs, so a step leaves that hook, the first, in place.
    num_kept = isinstance(called_with[0], torch.optim.Optimizer) if called_with else 0
    while len(_hooks) > num_kept:
        _hooks.pop().remove()
    while _shared:
        saved, own = (reference() for reference in _shared.pop())
        if saved is None or own is None or saved.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            continue
        # A forward may run in inference mode, and what is made there cannot be trained.
        with torch.inference_mode(False):
            own.data = own.detach().clone()
