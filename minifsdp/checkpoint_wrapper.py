"""Activation checkpointing at the import path that tutorials use. All classes and functions come from torch.

A unit with activation checkpointing recomputes its forward in backward, from all-gathered parameters (PAR-07). It does
not need a wrapper of minifsdp. This file only adds the older name ``apply_activation_checkpointing_wrapper``, which
issues a deprecation warning.

Spec: LEGACY-15.
"""

# `__all__` below lists the exported names.
# ruff: noqa: F403, F405

from collections.abc import Callable

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import *

from minifsdp.checks.arguments import warn_renamed

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
    """Wraps the chosen modules in place. This is the 2022 name of ``apply_activation_checkpointing``.

    Args:
        model: the model, which is not wrapped itself.
        checkpoint_wrapper_fn: wraps one module.
        check_fn: returns whether to wrap a module.
    """
    warn_renamed(
        "apply_activation_checkpointing_wrapper", "apply_activation_checkpointing"
    )
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper_fn, check_fn=check_fn
    )
