"""Getting and setting the state of a sharded model and of its optimizer.

`WrapperApi` and `FunctionApi` implement this for the two APIs. To use a different library, implement the two methods of
`Api`. The other modules that save and resume stay the same.

There are two forms of the state. Both use the parameter names of the plain model as keys, such as
``blocks.0.up.weight``, also for the state of the optimizer. The state dict of an optimizer itself uses numbers as keys.
Under a number, it would store the flat shard of a unit, which can only be loaded with the same units on the same number
of ranks. ::

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

__all__ = ["Api", "FunctionApi", "WrapperApi"]

State = dict[str, Any]


class Api(Protocol):
    """The two methods that an API must implement. All ranks must call both."""

    def get_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> State:
        """Returns the state of both, keyed by the names of the plain model: ``{"model": ..., "optim": ...}``.

        Args:
            model: the model, sharded by this library.
            optimizer: the optimizer of its parameters.
            full: return unsharded tensors in CPU memory, on rank 0 only. Otherwise return ``DTensor``s with this rank's
                shards.
        """
        ...

    def set_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, full: bool) -> None:
        """Loads a state from `get_state`. It must fit the model. A full state must be passed on every rank."""
        ...


class WrapperApi:
    """For a model in ``FullyShardedDataParallel``.

    Args:
        library: ``"minifsdp"`` or ``"torch"``. Both have the same names.
    """

    def __init__(self, library: str) -> None:
        # torch deprecates this interface; the tutorial shows it nevertheless.
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.fsdp\.")
        self.library = importlib.import_module("torch.distributed.fsdp" if library == "torch" else library)
        self.wrapper = self.library.FullyShardedDataParallel

    def get_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> State:
        """See `Api.get_state`. All-gathers the units one by one, so all ranks must call it."""
        with self._form(model, full=full, rank0_only=True):
            return {"model": model.state_dict(), "optim": self.wrapper.optim_state_dict(model, optimizer)}

    def set_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, full: bool) -> None:
        """See `Api.set_state`."""
        with self._form(model, full=full, rank0_only=False):
            # Input: keyed by name, unsharded or sharded by rows. Output: keyed by number, sharded like the units.
            numbered = self.wrapper.optim_state_dict_to_load(model, optimizer, state["optim"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(numbered)

    def _form(self, model: nn.Module, *, full: bool, rank0_only: bool) -> AbstractContextManager[Any]:
        of = self.library
        # Offload to the CPU, because a GPU that stores a shard may not have enough memory for the whole model.
        offload = next(model.parameters()).device.type != "cpu"
        if full:
            model_form = of.FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
            optim_form = of.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
            return self.wrapper.state_dict_type(model, of.StateDictType.FULL_STATE_DICT, model_form, optim_form)
        model_form, optim_form = of.ShardedStateDictConfig(), of.ShardedOptimStateDictConfig(offload_to_cpu=offload)
        return self.wrapper.state_dict_type(model, of.StateDictType.SHARDED_STATE_DICT, model_form, optim_form)


class FunctionApi:
    """For a model after ``fully_shard``, torch's or minifsdp's. torch's own functions support DTensor parameters.

    It uses the same names and the same structure as `WrapperApi`, so each of the two can load a state of the other.
    """

    def get_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> State:
        """See `Api.get_state`."""
        of_model, of_optimizer = get_state_dict(model, optimizer, options=_options(full))
        return {"model": of_model, "optim": of_optimizer}

    def set_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State, *, full: bool) -> None:
        """See `Api.set_state`."""
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=_options(full)
        )


def _options(full: bool) -> StateDictOptions:
    # Full and offloaded: unsharded, in CPU memory, on rank 0 only.
    return StateDictOptions(full_state_dict=full, cpu_offload=full)
