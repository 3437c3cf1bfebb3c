"""Detects where a unit's backward starts and ends, with tensor hooks.

A unit's backward begins when the gradient of its output is computed. It ends when the gradients of its parameters are
complete. The layout determines how to detect this, so there are two kinds of hooks:

1. *Leaf hooks.* If all parameters are views of one leaf, autograd accumulates into that leaf after every use of every
   parameter has contributed, even if the module was called several times. The layout registers one hook there, once.
   A unit without trainable parameters has no gradient to wait for: its backward ends when the gradients of its inputs
   are computed, or, if no input needs a gradient, at the end of backward.
2. *Inputs hooks.* With one leaf for each parameter, the leaves that get a gradient can differ between backwards. So the
   module gets views of its inputs. When the gradients of these views are computed, the backward of the unit is done:
   the views are older than every other node of the unit, and autograd runs the newest node first.
   If no input needs a gradient, the end of backward handles the unit (`InputsHooks.is_overdue`).

Three mechanisms:

* a **tensor hook** runs when the gradient of the tensor is computed, before autograd uses this gradient;
* a **view** of an input has its own gradient, which is complete after the backward of all operations of the unit on
  it. A hook on the input itself would also wait for other operations on that input. If the module changes the view in
  place, autograd updates the input as well, and no longer calls the hook: the end of backward handles the unit;
* the **ID of the running backward** in this thread distinguishes nested backwards.

Worked example, ``y = unit(x)`` where ``x`` is also used elsewhere::

    x --(view)-- x' (hook)  -->  unit  -->  y (hook)
    backward:    one hook runs when dy is computed, the other when dx' is computed; dx also needs the other uses of x

3. *Results in the inputs.* A module that returns None can put its result in a list or dict of its inputs, or change
   an input in place. So all tensors in its inputs get the pre-backward hook.

*In torch:* ``RegisterPostBackwardFunction`` and ``_register_pre_backward_hook`` of FSDP2. FSDP1 registers its hook for
the gradient in each forward, on a node that it gets by expanding the flat parameter.

Spec: FS2-13, FWD-06, ORIG-14, PAR-07, PROG-103.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import register_multi_grad_hook

from minifsdp.engine.precision import map_tensors, tensors_in
from minifsdp.engine.unit import Phase, Unit

# The ID of the backward that runs in this thread; a nested backward has another ID.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
NOT_IN_BACKWARD = -1
_REQUIRES_GRAD = attrgetter("requires_grad")

UnitCallback = Callable[[Unit], None]


class LeafHooks:
    """1. Detects the start of one unit's backward, and the end if the unit is frozen.

    The layout registers the hook that detects the end, see `Layout.on_gradient`. This class detects the end of frozen
    units only.

    Args:
        unit: the unit.
        pre_backward: called when the gradient of the unit's output is computed.
        post_backward: called by `InputsHooks` only, when the gradients of the inputs are complete.
        finish: called at the end of the unit's backward if the unit has no trainable parameters.

    Attributes:
        num_recorded: number of recorded forwards since the last backward, only for units without trainable parameters.
    """

    def __init__(
        self,
        unit: Unit,
        pre_backward: UnitCallback,
        post_backward: UnitCallback,
        finish: UnitCallback,
    ) -> None:
        self.num_recorded = 0
        self._unit = unit
        self._post_backward = post_backward
        self._finish = finish
        self._pre_backward: Callable[[torch.Tensor], None] = lambda _: pre_backward(
            unit
        )

    def hook_inputs(self, inputs: Any) -> Any:
        """Called before a forward; returns ``inputs`` as the unit's module must receive them."""
        return inputs

    def hook_output(self, inputs: Any, output: Any) -> bool:
        """Called after a forward: registers the pre-backward hook, and hooks the inputs of a frozen unit.

        Returns:
            Whether a backward can follow.
        """
        unit = self._unit
        is_registered = register_pre_backward_hook(
            output, self._pre_backward, inputs=inputs
        )
        if is_registered and not any(map(_REQUIRES_GRAD, unit.layout.local_parameters)):
            # If the unit is used more than once, it stays unsharded for the other uses until the end of backward.
            self.num_recorded += 1
            hooked = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
            if hooked:
                register_multi_grad_hook(
                    hooked,
                    lambda _: self._finish(unit) if self.num_recorded == 1 else None,
                )
        return is_registered

    def is_overdue(self) -> bool:
        """Whether a unit has gradients at the end of a backward in which its post-backward hook did not run."""
        return False


class InputsHooks(LeafHooks):
    """2. A hook of the inputs calls the post-backward hook. The end of backward handles the remaining cases."""

    def hook_inputs(self, inputs: Any) -> Any:
        """Returns ``inputs`` with views, whose hook runs when their gradients are computed."""
        if not torch.is_grad_enabled() or self._unit.phase is not Phase.FORWARD:
            return inputs
        others: list[torch.Tensor] = []
        watched = [
            tensor for tensor in tensors_in(inputs, others) if tensor.requires_grad
        ]
        if not watched:
            return inputs
        has_list = not {list, dict}.isdisjoint(
            map(type, (*inputs[0], *inputs[1].values()))
        )
        if has_list or (others and any(tensor.requires_grad for tensor in others)):
            # The module may change an argument that is a list or dict, or another container, so it needs the caller's
            # object. A list inside a tuple is copied.
            # Hooks on the caller's tensors run later, because they also wait for the caller's other operations.
            register_multi_grad_hook(watched, self._reached)
            return inputs
        views = [tensor.view_as(tensor) for tensor in watched]
        for tensor, view in zip(watched, views, strict=True):
            if tensor.is_leaf and graph_task() == NOT_IN_BACKWARD:
                # Otherwise ``.grad`` of the input would share memory with the gradient of the output.
                view.register_hook(torch.clone)
        if len(views) == 1:
            views[0].register_hook(self._reached)
        else:
            register_multi_grad_hook(views, self._reached)
        left = iter(views)
        return map_tensors(
            lambda tensor: next(left) if tensor.requires_grad else tensor, inputs
        )

    def _reached(self, gradients: Any) -> None:
        if torch.is_grad_enabled():
            # A backward through these gradients (``create_graph=True``) needs the parameters again.
            register_pre_backward_hook(gradients, self._pre_backward)
        elif self._unit.is_held:
            # On an accelerator, autograd can compute these gradients before those of the parameters, because the thread
            # of the device recorded that part of the graph. The end of backward handles the unit.
            return
        if self._unit.phase is Phase.PRE_BACKWARD:
            self._post_backward(self._unit)

    def hook_output(self, inputs: Any, output: Any) -> bool:
        """Registers the pre-backward hook, except on inputs that the module returns unchanged in a container."""
        return register_pre_backward_hook(
            output, self._pre_backward, apart_from=inputs, inputs=inputs
        )

    def is_overdue(self) -> bool:
        """Whether gradients remain to be reduced: no input needed a gradient, or autograd did not reach the inputs."""
        unit = self._unit
        if unit.phase is Phase.PRE_BACKWARD or any(
            leaf.grad is not None for leaf in unit.layout.leaves
        ):
            return True
        return unit.policy.reduces and unit.layout.has_unreduced


def register_pre_backward_hook(
    output: Any,
    notify: Callable[[torch.Tensor], None],
    *,
    apart_from: Any = (),
    inputs: Any = (),
) -> bool:
    """Calls ``notify`` when the gradient of any tensor in ``output`` is computed.

    Tensors of a container that are also in ``apart_from`` get no hook, because their gradients may have other parts. An
    output that is a single tensor always gets the hook.

    If ``output`` is None, the tensors in ``inputs`` get the hook instead (note 3).

    Returns:
        Whether a tensor requires grad.
    """
    tensors = [output]
    if output is None:
        tensors = list(tensors_in(inputs))
    elif not isinstance(output, torch.Tensor):
        left_out = {id(tensor) for tensor in tensors_in(apart_from)}
        tensors = [
            tensor for tensor in tensors_in(output) if id(tensor) not in left_out
        ]
        if (
            not tensors
            and hasattr(output, "__dict__")
            and not isinstance(output, nn.Module)
        ):
            # An object of a user's class.
            tensors = list(tensors_in(vars(output)))
    is_registered = False
    for tensor in tensors:
        if tensor.requires_grad:
            is_registered = True
            tensor.register_hook(notify)
            if (
                forward_ad._current_level >= 0
                and (tangent := forward_ad.unpack_dual(tensor).tangent) is not None
            ):
                # The tangent of forward-mode differentiation has a graph of its own.
                register_pre_backward_hook(tangent, notify)
            if tensor._base is not None and tensor._base.grad_fn is not None:
                # The caller may change a view in place. Autograd then bypasses the view and uses its base.
                tensor._base.register_hook(notify)
        elif torch._C._functorch.is_batchedtensor(tensor):
            # A tensor inside ``torch.vmap`` is a view of the batch, which has the graph. No parameters are kept for its
            # backward, which may never run.
            register_pre_backward_hook(
                torch._C._functorch.get_unwrapped(tensor), notify
            )
    return is_registered
