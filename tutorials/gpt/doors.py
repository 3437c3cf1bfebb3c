"""Getting and setting the state of a sharded model and of its optimizer.

Only this module connects saving and resuming to the library that shards. To use another library, implement these two
methods; the rest of saving and resuming stays the same.

Both forms have the same keys, those of the plain model: ``blocks.0.up.weight``, without names of units or slices. The
optimizer's state is keyed by them, too. A plain optimizer numbers its parameters. Under such a number it would store
a slice of a unit, which only fits the same wrapping on the same number of ranks. ::

    full       unsharded tensors, on rank 0 only            {"blocks.0.up.weight": 576 x 144}     rank 1: {}
    sharded    tensors sharded by rows, on all ranks        rows 0 to 287                         rows 288 to 575

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
    """The two methods that a library must implement. All ranks must call both."""

    def state_of(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> State:
        """Returns the state of both, keyed by the names of the plain model: ``{"model": ..., "optim": ...}``.

        Args:
            model: sharded by this library.
            optimizer: of its parameters.
            full: unsharded tensors in CPU memory, on rank 0 only. Otherwise this rank's shard of each, as ``DTensor``.
        """
        ...

    def give_back(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, full: bool) -> None:
        """Loads a state from `state_of`. It must fit the model; a full state is needed on every rank."""
        ...


class WrapperDoor:
    """For a model in ``FullyShardedDataParallel``.

    Args:
        library: ``"minifsdp"`` or ``"torch"``. Both have the same names.
    """

    def __init__(self, library: str) -> None:
        # torch deprecates this interface; the tutorial shows it nevertheless.
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.fsdp\.")
        self.library = importlib.import_module("torch.distributed.fsdp" if library == "torch" else library)
        self.wrapper = self.library.FullyShardedDataParallel

    def state_of(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> State:
        """See `Door.state_of`. All-gathers the units one by one, so all ranks must call it."""
        with self._form(model, full=full, rank0_only=True):
            return {"model": model.state_dict(), "optim": self.wrapper.optim_state_dict(model, optimizer)}

    def give_back(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, full: bool) -> None:
        """See `Door.give_back`."""
        with self._form(model, full=full, rank0_only=False):
            # Input: by name, unsharded or sharded by rows. Output: by number, sharded as the units are.
            numbered = self.wrapper.optim_state_dict_to_load(model, optimizer, state["optim"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(numbered)

    def _form(self, model: nn.Module, *, full: bool, rank0_only: bool) -> AbstractContextManager[Any]:
        of = self.library
        # To the CPU, unless the model is there already: a GPU that holds a shard may not have memory for the whole.
        offload = next(model.parameters()).device.type != "cpu"
        if full:
            model_form = of.FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
            optim_form = of.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
            return self.wrapper.state_dict_type(model, of.StateDictType.FULL_STATE_DICT, model_form, optim_form)
        model_form, optim_form = of.ShardedStateDictConfig(), of.ShardedOptimStateDictConfig(offload_to_cpu=offload)
        return self.wrapper.state_dict_type(model, of.StateDictType.SHARDED_STATE_DICT, model_form, optim_form)


class FunctionDoor:
    """For a model after ``fully_shard``, torch's or minifsdp's: torch's own functions support its DTensor parameters.

    It uses the same names and the same structure as `WrapperDoor`, so each of the two can load what the other one has
    saved.
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
    # Full and offloaded: unsharded, in CPU memory, on rank 0 only.
    return StateDictOptions(full_state_dict=full, cpu_offload=full)
