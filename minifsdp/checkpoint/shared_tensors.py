"""Tensors that a saved dict shares with the model, until the model is about to change them.

Buffers and ignored parameters belong to no unit, so nothing has to be gathered to save them. A copy would cost memory
for nothing, since most dicts are written and dropped before the next step. The dict is given the model's memory, as by
any ``nn.Module``. If the caller still has it when values are about to change, the *model* moves to new memory::

    saved = model.state_dict()      saved["norm.running_mean"] --+
                                    model.norm.running_mean -----+--> 1.0
    model(batch)                    saved["norm.running_mean"] -----> 1.0
                                    model.norm.running_mean --------> 1.0, and soon 1.1

It is the model that moves, for a thread may be writing the dict to a disk. Values are about to change when a wrapper of
the model runs forward, an optimizer steps, or a state is loaded. Until then there are a few hooks, and none in a step
after which nothing was saved. Whoever changes such a tensor by hand changes what was saved.

*In torch:* shared for good; running statistics in a dict that is kept go on with the training.

Spec: SD-FULL-07.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_shared: list[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = []
_hooks: list[RemovableHandle] = []
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_alike(saved: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether ``saved`` is all of the memory of ``own``, seen in the same way, and another object."""
    return (
        saved is not own
        and (saved.shape, saved.stride(), saved.dtype) == (own.shape, own.stride(), own.dtype)
        and saved.untyped_storage().nbytes() == saved.nbytes
    )


def share(saved: torch.Tensor, own: torch.Tensor) -> None:
    """Remembers that ``saved``, in a dict, lies in the memory of ``own``, in the model; until `part`."""
    _shared.append((weakref.ref(saved), weakref.ref(own)))


def watch(wrappers: Iterable[nn.Module]) -> None:
    """Lets the next forward of any of these, or the next step of any optimizer, begin with `part`."""
    _shared[:] = [pair for pair in _shared if pair[0]() is not None]
    if not _shared:
        return
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(part))
    # A program may save often between two forwards.
    fresh = [wrapper for wrapper in wrappers if wrapper not in _watched]
    _hooks.extend(wrapper.register_forward_pre_hook(part) for wrapper in fresh)
    _watched.update(fresh)


def part(*_: Any) -> None:
    """Gives the model memory of its own wherever a dict that is still there lies in it."""
    while _hooks:
        _hooks.pop().remove()
    _watched.clear()
    while _shared:
        saved, own = (reference() for reference in _shared.pop())
        if saved is None or own is None or saved.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            continue
        # A forward may run in inference mode, and what is made there cannot be trained.
        with torch.inference_mode(False):
            own.data = own.detach().clone()
