"""``grad_dtype`` of a parameter: the dtype of its gradient.

The weights are stored in bfloat16, and their gradients are added and reduced in float32::

    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    fully_shard(model)
    for batch in micro_batches:
        loss(model(batch)).backward()
    model.weight.grad.dtype                 # torch.float32

The engine reads the attribute. `ShardedParam.accumulates_in` is the dtype in which gradients are added and reduced,
unless the policy has a ``reduce_dtype``. The reduction of a unit with several choices uses their common dtype. A
reduced gradient is cast to ``grad_dtype``, except with ``None``, which means any dtype. Set the attribute before the
first forward: a later choice does not change the dtype of the reduction.

Without this case, the sharded parameters do not have the choice of the original ones, and autograd adds the gradients
of one backward in the dtype of the computation. A conversion such as ``model.half()`` loses the choice as well, because
it swaps the contents of DTensors, and ``grad_dtype`` is not a part of them. A choice that equals the dtype of the
parameter counts as no choice.

*In torch:* ``FSDPModule._apply`` and ``_capture_grad_dtype_policy`` of ``FSDPParam``. Before 2.15, torch's FSDP ignores
the attribute.

Spec: NEW-18.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from minifsdp.engine.per_param import PerParameterLayout


def keep_grad_dtype(before: torch.Tensor, parameter: torch.Tensor) -> None:
    """Gives ``parameter`` the ``grad_dtype`` that the user has chosen for ``before``."""
    if before.grad_dtype is not before.dtype:
        parameter.grad_dtype = before.grad_dtype


def keep_grad_dtypes(
    layout: PerParameterLayout, originals: Iterable[nn.Parameter]
) -> None:
    """Gives each parameter of a new layout the ``grad_dtype`` of the original. Chooses the reduce dtype again."""
    for param, original in zip(layout.params, originals, strict=True):
        keep_grad_dtype(original, param.parameter)
    layout.choose_dtype()
    add_in_grad_dtype(layout)


def add_in_grad_dtype(layout: PerParameterLayout) -> None:
    """Makes autograd add the gradients of one backward in the dtype of the reduction, if the user has a choice."""
    for param in layout.params:
        if param.parameter.grad_dtype not in (None, param.parameter.dtype):
            dtype = layout.precision.reduces_in(param.parameter.grad_dtype)
            param.leaf.grad_dtype = dtype


@contextmanager
def kept_grad_dtypes(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, the program may convert ``parameters``. Keeps each ``grad_dtype``, and gradients of this dtype."""
    chosen = [p for p in parameters if p.grad_dtype is not p.dtype]
    before = [(p, p.grad_dtype, p.grad) for p in chosen]
    for parameter in chosen:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, dtype, gradient in before:
            parameter.grad_dtype = dtype
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device)
