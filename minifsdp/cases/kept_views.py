"""``parameters()`` between a forward and its backward, while modules have views instead of parameters.

With original parameters and a strategy that keeps them unsharded, the modules of a unit have the views that the forward
has used. A program may read its parameters at this time, for example for a penalty. It may also create its optimizer
too late::

    model = FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
    loss = model(x).sum()
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (loss + penalty).backward()                                 # trains the penalty
    loss = model(x).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)     # an error: create it before the forward

Without this case, ``parameters()`` returns plain tensors here. The error of the optimizer would not name the cause, and
a hook on such a tensor would never be called, because no gradient passes through it. `named_parameters` of a wrapper
calls `kept_view` for each value.

*In torch:* the views are plain tensors.

Spec: PROG-05, PROG-100.
"""

from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minifsdp.engine.messages import message


class KeptView(torch.Tensor):
    """An unsharded parameter between a forward and its backward, as ``parameters()`` returns it (PROG-05).

    It is the result of an operation, not a parameter. An optimizer reads `retains_grad` of a tensor that is not a leaf.
    Its hooks are those of the original parameter, because no gradient passes through the `KeptView` itself.
    """

    __torch_function__ = nn.Parameter.__torch_function__

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(message("kept-view", shape=tuple(self.shape)))

    is_leaf = property(lambda _: False)
    retains_grad = property(_refuse)
    requires_grad_ = _refuse  # type: ignore[assignment]
    requires_grad = property(lambda _: True, _refuse)
    grad_fn = property(lambda self: get_gradient_edge(self.original).node)
    register_hook = property(attrgetter("original.register_hook"))
    register_post_accumulate_grad_hook = property(
        attrgetter("original.register_post_accumulate_grad_hook")
    )


def kept_view(value: Any) -> Any:
    """A `KeptView` of a view; other values are returned unchanged."""
    if type(value) is not torch.Tensor or value.is_leaf:
        return value
    kept = value.as_subclass(KeptView)
    vars(kept).update(vars(value))
    return kept
