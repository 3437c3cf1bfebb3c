"""``requires_grad`` and hooks that the program sets on a parameter after sharding.

A program fine-tunes the head first, and the whole model later::

    fully_shard(model)
    model.body.requires_grad_(False)
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    loss(model(batch)).backward()
    model.body.requires_grad_(True)

Without this case, nothing of this has an effect. The program sets it on the optimizer's parameter, and autograd reads
the unsharded one.

A module can also set it on the unsharded parameter, in its forward. The case compares the two tensors of each parameter
when an outermost forward begins, and when the backward of a unit begins. The one that has changed since then is right.

*In torch:* ``FSDPParam.to_unsharded`` copies ``requires_grad``; tensor hooks of a parameter are not called.

Spec: FS2-22, FS2-28.
"""

from typing import Any

import torch

from minifsdp.engine.root import RootState
from minifsdp.engine.sharded_param import ShardedParam
from minifsdp.engine.unit import Unit


class ParameterSettings:
    """Makes the sharded and the unsharded parameters agree. Flat units do it on their own.

    Args:
        root_state: the root of the units.
    """

    def __init__(self, root_state: RootState) -> None:
        self._units = root_state.units
        if any(unit.layout.shards_are_distributed for unit in self._units):
            points = root_state.iteration.points
            points.forward_begins.append(self._forward_begins)
            points.unit_backward.append(agree)

    def _forward_begins(self) -> None:
        agree(*self._units)


def agree(*units: Unit[Any]) -> None:
    """Makes the two tensors of each parameter of ``units`` agree."""
    for unit in units:
        for param in unit.layout.params:
            is_trained = param.parameter.requires_grad
            if not param.leaf.requires_grad is is_trained is param.is_trained:
                _toggle_requires_grad(param)
            if param.leaf._backward_hooks is not param.parameter._backward_hooks:
                _share_tensor_hooks(param.parameter, param.leaf)


def _toggle_requires_grad(param: ShardedParam) -> None:
    param.is_trained = not param.is_trained
    param.leaf.requires_grad_(param.is_trained)
    param.parameter.requires_grad_(param.is_trained)


def _share_tensor_hooks(parameter: torch.Tensor, leaf: torch.Tensor) -> None:
    # Autograd calls those of the leaf.
    if parameter._backward_hooks is None:
        parameter._backward_hooks = leaf._backward_hooks
    else:
        leaf._backward_hooks = parameter._backward_hooks
