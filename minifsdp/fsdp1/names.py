"""Names of parameters and buffers, as a wrapper shows them.

Names contain the wrappers' prefixes, as in torch. Inside ``summon_full_params``, they are the names of the unwrapped
model. The methods of the wrapper also look up attributes and items in the wrapped module: ``model.layer``, ``model[0]``
and ``model.vocab_size``.

Worked example: the weight of ``FSDP(Sequential(FSDP(Linear(2, 2))))`` is named
``_fsdp_wrapped_module.0._fsdp_wrapped_module.weight``, and inside ``summon_full_params`` it is named ``0.weight``.

*In torch:* methods of the wrapper class.

Spec: NAMES-02, NAMES-03, PROG-05, PROG-100.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minifsdp.engine.messages import message
from minifsdp.fsdp1.wrapper import PREFIX, Wrapper

T = TypeVar("T")


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
    register_post_accumulate_grad_hook = property(attrgetter("original.register_post_accumulate_grad_hook"))


def kept_views(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """The names and parameters of ``named``, with a `KeptView` for each view."""
    for name, value in named:
        kept: Any = value
        if type(value) is torch.Tensor and not value.is_leaf:
            kept = value.as_subclass(KeptView)
            vars(kept).update(vars(value))
        yield name, kept


def shown(wrapper: Wrapper, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """The names and values of ``named``, without wrapper prefixes inside ``summon_full_params``."""
    for name, value in named:
        yield (name.replace(PREFIX, "") if wrapper._shows_clean_names else name), value
