"""How the state of a sharded model and of its optimizer is asked for, and given back.

This is the one place where saving and resuming touch the library that shards. Whoever shards by other means writes two
such methods, and the rest of saving and resuming stays as it is.

Both forms have the same keys, those of the plain model: ``blocks.0.up.weight``, and not a word of units or slices. The
optimizer's state is keyed by them, too. A plain optimizer numbers its parameters, and behind a number there would be a
slice of this or that unit, which fits nothing but the same wrapping on the same number of ranks. ::

    full       every tensor whole, on rank 0 only           {"blocks.0.up.weight": 576 x 144}     rank 1: {}
    sharded    every tensor cut by rows, on all ranks       rows 0 to 287                         rows 288 to 575

Spec: TRAIN-09, TRAIN-10.
"""

from __future__ import annotations

import importlib
import warnings
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

__all__ = ["Door", "FunctionDoor", "WrapperDoor"]

State = dict[str, Any]


class Door(Protocol):
    """The two things that a library must be able to do. Both are for all ranks together."""

    def state_of(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> State:
        """The state of both, keyed by the names of the plain model: ``{"model": ..., "optim": ...}``.

        Args:
            model: sharded by this library.
            optimizer: over its parameters.
            full: whole tensors in CPU memory, on rank 0 only. Otherwise this rank's part of each, as ``DTensor``.
        """
        ...

    def give_back(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, full: bool) -> None:
        """Loads what `state_of` gave. It must fit; a full one must be there on every rank."""
        ...


class WrapperDoor:
    """For a model in ``FullyShardedDataParallel``.

    Args:
        library: whose, ``"minifsdp"`` or ``"torch"``. They have all names in common.
    """

    def __init__(self, library: str) -> None:
        # torch says of this interface that it is the older one. It is, and here it is shown.
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.fsdp\.")
        self.library = importlib.import_module("torch.distributed.fsdp" if library == "torch" else library)
        self.wrapper = self.library.FullyShardedDataParallel

    def state_of(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> State:
        """See `Door.state_of`. Units are gathered one by one, so a rank that stayed away would stop the others."""
        with self._form(model, full=full, rank0_only=True):
            return {"model": model.state_dict(), "optim": self.wrapper.optim_state_dict(model, optimizer)}

    def give_back(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, full: bool) -> None:
        """See `Door.give_back`."""
        with self._form(model, full=full, rank0_only=False):
            # By name, and whole or cut by rows, on the way in; numbered, and cut as the units are, on the way out.
            numbered = self.wrapper.optim_state_dict_to_load(model, optimizer, state["optim"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(numbered)

    def _form(self, model: nn.Module, *, full: bool, rank0_only: bool) -> AbstractContextManager[Any]:
        of = self.library
        # To the CPU, unless the model is there already: a GPU that holds a part may have no room for the whole.
        offload = next(model.parameters()).device.type != "cpu"
        if full:
            model_form = of.FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
            optim_form = of.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
            return self.wrapper.state_dict_type(model, of.StateDictType.FULL_STATE_DICT, model_form, optim_form)
        model_form, optim_form = of.ShardedStateDictConfig(), of.ShardedOptimStateDictConfig(offload_to_cpu=offload)
        return self.wrapper.state_dict_type(model, of.StateDictType.SHARDED_STATE_DICT, model_form, optim_form)


class FunctionDoor:
    """For a model after ``fully_shard``, whoever's: its parameters are DTensors, so torch's own functions know the way.

    They give and take the same names and the same structure as `WrapperDoor`, so that either can read what the other
    has written.
    """

    def state_of(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> State:
        """See `Door.state_of`."""
        of_model, of_optimizer = get_state_dict(model, optimizer, options=_options(full))
        return {"model": of_model, "optim": of_optimizer}

    def give_back(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, full: bool) -> None:
        """See `Door.give_back`."""
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=_options(full)
        )


def _options(full: bool) -> StateDictOptions:
    # Full and offloaded means: whole, in CPU memory, on rank 0 alone.
    return StateDictOptions(full_state_dict=full, cpu_offload=full)
