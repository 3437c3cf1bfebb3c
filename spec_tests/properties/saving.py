"""Saves model and optimizer, and loads them into others, in each form that a front end supports.

===========  ==================================================  ===================================================
form         the wrapper                                         `fully_shard`, by torch's functions for state dicts
===========  ==================================================  ===================================================
``full``     full values on each rank                            the same
``rank0``    full values on the CPU of rank 0, else nothing      the same; loaded by a broadcast
``sharded``  ``ShardedTensor``                                   ``DTensor``
``dtensor``  ``DTensor``
``local``    this rank's shard, and the optimizer's own dict
``own``                                                          a copy of both objects' ``state_dict()``
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

# The states of the model and of the optimizer.
Saved = tuple[dict[str, Any], dict[str, Any]]


def save(description: Description, model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    """The state to save; it shares no memory with the model and the optimizer."""
    form = description.resumes
    if form == "own":
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if is_per_parameter(description):
        return copy.deepcopy(get_state_dict(model, optimizer, options=_options(form)))
    with _chosen(model, form):
        if form == "local":
            # This form has no transformed optimizer state (OSD-07).
            return model.state_dict(), copy.deepcopy(optimizer.state_dict())
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def load(description: Description, model: nn.Module, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    """Loads a saved state into another model of the same kind and into its optimizer."""
    form, (weights, states) = description.resumes, saved
    if form != "own" and is_per_parameter(description):
        options = _options(form, loads=True)
        # Two calls: `set_state_dict` does not load an empty part, and a part is empty on some ranks only.
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, states, options=options)
        return
    if form == "rank0":
        # The wrapper sends the optimizer's state. The user sends the model's.
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
    """The wrapper's settings for a form; does nothing for a model of `fully_shard`."""
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
