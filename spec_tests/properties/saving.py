"""Saving model and optimizer, and loading them into others, in each form that a door has.

===========  ==================================================  ===================================================
form         the wrapper                                         the function, by torch's functions for state dicts
===========  ==================================================  ===================================================
``full``     the whole on each rank                              the same
``rank0``    the whole on the CPU of rank 0, nothing elsewhere   the same; loaded by a broadcast
``sharded``  ``ShardedTensor``                                   ``DTensor``
``dtensor``  ``DTensor``
``local``    this rank's part, and the optimizer's own dict
``own``                                                          what ``state_dict()`` of both gives, copied
===========  ==================================================  ===================================================

All ranks must call both functions.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import minifsdp
from minifsdp import FullyShardedDataParallel
from spec_tests.properties.build import is_per_parameter
from spec_tests.properties.description import Description

__all__ = ["Saved", "load", "save"]

# The model's part and the optimizer's.
Saved = tuple[dict[str, Any], dict[str, Any]]


def save(description: Description, model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    """What there is to be saved; it shares no memory with what is trained."""
    form = description.resumes
    if form == "own":
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if is_per_parameter(description):
        return copy.deepcopy(get_state_dict(model, optimizer, options=_options(form)))
    with _chosen(model, form):
        if form == "local":
            # There is no transformed state of the optimizer in this form (OSD-07).
            return model.state_dict(), copy.deepcopy(optimizer.state_dict())
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def load(description: Description, model: nn.Module, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    """Puts what was saved into another model of the same kind, and into its optimizer."""
    form, (weights, states) = description.resumes, saved
    if form != "own" and is_per_parameter(description):
        options = _options(form, loads=True)
        # Not both at once: `set_state_dict` takes an empty part for one that is not to be loaded, on that rank alone.
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, states, options=options)
        return
    if form == "rank0":
        # The optimizer's part is sent by the wrapper, the model's by the user.
        sent = [weights]
        dist.broadcast_object_list(sent, src=0)
        weights = sent[0]
    with _chosen(model, form):
        model.load_state_dict(weights)
        if form not in ("local", "own"):
            states = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states)
    optimizer.load_state_dict(states)


def _options(form: str, *, loads: bool = False) -> StateDictOptions:
    is_rank0s = form == "rank0"
    return StateDictOptions(
        full_state_dict=form in ("full", "rank0"), cpu_offload=is_rank0s, broadcast_from_rank0=loads and is_rank0s
    )


def _chosen(model: nn.Module, form: str) -> AbstractContextManager[Any]:
    """The wrapper's settings for a form; nothing for a model of the function."""
    kind, options = {
        "full": ("Full", {}),
        "rank0": ("Full", {"rank0_only": True, "offload_to_cpu": True}),
        "sharded": ("Sharded", {}),
        "dtensor": ("Sharded", {"use_dtensor": True}),
        "local": ("Local", {}),
        "own": ("Full", {}),
    }[form]
    return FullyShardedDataParallel.state_dict_type(
        model,
        minifsdp.StateDictType[f"{kind.upper()}_STATE_DICT"],
        getattr(minifsdp, f"{kind}StateDictConfig")(**options),
        getattr(minifsdp, f"{kind}OptimStateDictConfig")(**options),
    )
