"""What tells that autograd has come to a place: the two kinds of triggers, and the devices that they are made of.

A unit's backward begins when the gradient of its output arrives. When is it over, that is, when are the gradients of
its parameters complete? What can tell depends on the layout, and so there are two kinds of a `Trigger`:

1. The *leaf* tells. Where all parameters are views of one leaf, autograd accumulates into it exactly when every use of
   every parameter of the unit has contributed, also when the module was called twice. The layout has a hook there, laid
   once for good. A unit without trained parameters has no gradient to wait for: its backward is over when the gradients
   of its inputs are known, and if there are none, at the end of backward.
2. The *inputs* tell. With a leaf for each parameter it is not known which of them will get a gradient in this backward.
   So the inputs of the module pass through a node, and when autograd comes back to that, all in between is done. What
   is missed, because no input asks for a gradient, is overdue at the end of backward.

Three small devices, laid in forward, that go off in backward:

* a **wire** on a tensor goes off when the gradient of that tensor has arrived, before it is used any further;
* a tensor may be **passed through** a node that does nothing forward. Autograd comes back to it when everything between
  the node and what was computed from it is done; a wire on an input would wait for its other users, too;
* the **number of the backward** that this thread is inside of tells nested ones apart.

Worked example, ``y = unit(x)`` where ``x`` is also used elsewhere::

    x --(node)-- x'  -->  unit  -->  y --(wire)
    backward:    the wire goes off when dy is there, the node when dx' is; dx needs the other users of x as well

*In torch:* ``RegisterPostBackwardFunction`` and ``_register_pre_backward_hook`` of FSDP2. FSDP1 lays its hook for the
gradient in each forward, on a node that it reaches by expanding the flat parameter.

Spec: FS2-13, FWD-06, ORIG-14, PAR-07.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from minifsdp.engine.precision import map_tensors, tensors_in
from minifsdp.engine.unit import Phase, Unit

# The number of the backward that this thread is inside of; nested ones have numbers of their own.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
NOT_IN_BACKWARD = -1

Tell = Callable[[Unit], None]


class Trigger(ABC):
    """What tells of one unit where its backward begins and ends.

    Args:
        unit: of which it tells.
        pre_backward: whom to tell that the gradient of its output has arrived.
        post_backward: whom to tell that its gradients are complete.
        close: whom to tell that its backward is over and there was no gradient to wait for.
    """

    def __init__(self, unit: Unit, pre_backward: Tell, post_backward: Tell, close: Tell) -> None:
        self._unit, self._post_backward, self._close = unit, post_backward, close
        self._wire: Callable[[torch.Tensor], None] = lambda _: pre_backward(unit)

    def watch_inputs(self, inputs: Any) -> Any:
        """Before a forward: ``inputs`` as the unit's module shall see them."""
        return inputs

    @abstractmethod
    def watch_output(self, inputs: Any, output: Any) -> bool:
        """After a forward that autograd records: lays the wires. Whether a backward through ``output`` is expected."""

    def is_overdue(self) -> bool:
        """At the end of a backward in which nothing was told: whether there are gradients all the same."""
        return False


class LeafTrigger(Trigger):
    """1. The hook is the layout's, see `Layout.on_gradient`. What it cannot tell is the end of a frozen unit."""

    def watch_output(self, inputs: Any, output: Any) -> bool:
        """Lays the wires, and hooks the inputs of a frozen unit."""
        unit, is_laid = self._unit, lay_wires(output, self._wire)
        if is_laid and not unit.layout.is_trained:
            # Used more than once, it must stay for the other uses; then the end of backward frees it.
            unit.num_uses += 1
            hooked = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
            if hooked:
                register_multi_grad_hook(hooked, lambda _: self._close(unit) if unit.num_uses == 1 else None)
        return is_laid


class InputsTrigger(Trigger):
    """2. The node behind the inputs tells, and what it has missed is seen at the end of backward."""

    def watch_inputs(self, inputs: Any) -> Any:
        """``inputs``, their tensors passed through a node that tells when their gradients have been computed."""
        if not torch.is_grad_enabled() or self._unit.phase is not Phase.FORWARD:
            return inputs
        watched = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if not watched:
            return inputs
        passed = iter(_Node.apply(self._reached, *watched))  # type: ignore[no-untyped-call]
        return map_tensors(lambda tensor: next(passed) if tensor.requires_grad else tensor, inputs)

    def _reached(self) -> None:
        if self._unit.phase is Phase.PRE_BACKWARD:
            self._post_backward(self._unit)

    def watch_output(self, inputs: Any, output: Any) -> bool:
        """Lays the wires, but not on an input that is handed on: its gradient may come when all is over."""
        return lay_wires(output, self._wire, apart_from=inputs)

    def is_overdue(self) -> bool:
        """Whether backward has left something to reduce: no input asked for a gradient, or it never reached them."""
        unit = self._unit
        return (
            unit.phase is Phase.PRE_BACKWARD
            or unit.layout.has_gradient
            or (unit.policy.reduces and unit.layout.has_unreduced)
        )


def trigger_for(
    unit: Unit, pre_backward: Tell, post_backward: Tell, close: Tell, make_room: Callable[..., None] | None
) -> Trigger:
    """The trigger of ``unit``, of the kind that its layout allows.

    Args:
        unit, pre_backward, post_backward, close: as for `Trigger`.
        make_room: is called before a flat gradient is put together, if anything.
    """
    leaf_tells = unit.layout.on_gradient(partial(post_backward, unit), make_room)
    return (LeafTrigger if leaf_tells else InputsTrigger)(unit, pre_backward, post_backward, close)


def lay_wires(output: Any, notify: Callable[[torch.Tensor], None], *, apart_from: Any = ()) -> bool:
    """Calls ``notify`` as soon as the gradient of any tensor in ``output`` has arrived, except those in ``apart_from``.

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
