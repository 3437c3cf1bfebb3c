"""Activation checkpointing as the tutorials import it; every class and function is torch's own.

A unit that is also checkpointed computes its forward again in backward, from parameters that are gathered for it then
(PAR-07). Nothing of that needs a wrapper of minifsdp's own. What is added here is the older name
``apply_activation_checkpointing_wrapper``, which warns.

Spec: LEGACY-15.
"""

# What is offered is named once, below.
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
    """The name of ``apply_activation_checkpointing`` in 2022: checkpoints, in place, every module that is chosen.

    Args:
        model: the model; it is not checkpointed itself.
        checkpoint_wrapper_fn: wraps one module.
        check_fn: chooses the modules.
    """
    warn_renamed("apply_activation_checkpointing_wrapper", "apply_activation_checkpointing")
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper_fn, check_fn=check_fn)
