"""Activation checkpointing at the import path that tutorials use. All classes and functions are torch's own.

A unit with activation checkpointing recomputes its forward in backward, from parameters that are all-gathered for it
(PAR-07). This does not need a wrapper specific to minifsdp. This file only adds the older name
``apply_activation_checkpointing_wrapper``, which issues a deprecation warning.

Spec: LEGACY-15.
"""

# `__all__` below lists the exported names.
# ruff: noqa: F403, F405

from collections.abc import Callable

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import *

from minifsdp.engine.messages import warn_renamed

__all__ = [
    "CheckpointImpl",
    "CheckpointWrapper",
    "apply_activation_checkpointing",
    "apply_activation_checkpointing_wrapper",
    "checkpoint_wrapper",
    "offload_wrapper",
]


def apply_activation_checkpointing_wrapper(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
) -> None:
    """The 2022 name of ``apply_activation_checkpointing``: wraps the chosen modules in place.

    Args:
        model: the model; it is not wrapped itself.
        checkpoint_wrapper_fn: wraps one module.
        check_fn: returns whether to wrap a module.
    """
    warn_renamed("apply_activation_checkpointing_wrapper", "apply_activation_checkpointing")
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper_fn, check_fn=check_fn)
