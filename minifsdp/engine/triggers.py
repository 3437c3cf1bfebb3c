"""What tells that autograd has reached a place: three small devices, laid in forward, that go off in backward.

* a **wire** on a tensor goes off when the gradient of that tensor has arrived, before it is used any further;
* a tensor may be **passed through** a node that does nothing forward; when autograd comes back to it, everything
  between the node and what was computed from it is done. A wire on an input would wait for its other users, too;
* the **number of the backward** that this thread is inside of tells nested ones apart.

Worked example, ``y = unit(x)`` where ``x`` is also used elsewhere::

    x --(node)-- x'  -->  unit  -->  y --(wire)
    backward:    the wire goes off when dy is there, the node when dx' is; dx needs the other users of x as well

*In torch:* ``RegisterPostBackwardFunction`` and ``_register_pre_backward_hook`` of FSDP2.

Spec: FS2-13, FWD-06, PAR-07.
"""

from collections.abc import Callable
from typing import Any

import torch

from minifsdp.engine.precision import map_tensors, tensors_in

NOT_IN_BACKWARD = -1


def graph_task() -> int:
    """The number of the backward that this thread is inside of; nested ones have numbers of their own."""
    return torch._C._current_graph_task_id()


def lay_wires(output: Any, notify: Callable[[torch.Tensor], None], *, apart_from: Any = ()) -> bool:
    """Calls ``notify`` as soon as the gradient of any tensor in ``output`` has arrived, of those in ``apart_from`` not.

    Returns:
        Whether there is a tensor in it that will have a gradient.
    """
    tensors = [output]
    if not isinstance(output, torch.Tensor):
        left_out = {id(tensor) for tensor in tensors_in(apart_from)}
        tensors = [tensor for tensor in tensors_in(output) if id(tensor) not in left_out]
    is_laid = False
    for tensor in tensors:
        if not tensor.requires_grad:
            continue
        is_laid = True
        tensor.register_hook(notify)
        if tensor._base is not None and tensor._base.grad_fn is not None:
            # The caller may change a view in place. Autograd then goes past the view, by way of what it is a view of.
            tensor._base.register_hook(notify)
    return is_laid


def pass_through(inputs: Any, notify: Callable[[], None]) -> Any:
    """``inputs``, their tensors passed through a node that calls ``notify`` when their gradients have been computed."""
    watched = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    if not watched:
        return inputs
    passed = iter(_Node.apply(notify, *watched))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: next(passed) if tensor.requires_grad else tensor, inputs)


class _Node(torch.autograd.Function):
    """Nothing forward, a word backward."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.notify = notify
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.notify()
        return (None, *gradients)
