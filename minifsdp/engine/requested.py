"""Detects a backward that requests gradients of registered parameters, and computes them.

``loss.backward(inputs=parameters)`` and ``autograd.grad(loss, parameters)`` only execute the nodes of the graph that
lead to the requested tensors. Users pass the *registered* parameters, but the leaves of the graph are other tensors,
the unsharded parameters. So autograd would find no path, compute nothing and raise no error.

Therefore the outputs of the root pass through a node, which has a path to all registered parameters::

    loss ... output --(node)-- output of the root's module ... unsharded parameters
                       |
                       +----- registered parameters

The node is the identity. It sends no gradient to the registered parameters, so a plain backward works as without it. In
a backward that requests registered parameters, autograd executes the node. The node then runs a nested backward that
requests the unsharded parameters instead, with all hooks of the units. A gradient of ``autograd.grad`` is returned and
not accumulated. A shard cannot be returned in this way, so this raises an error.

Worked example: ``backward(inputs=[shard of a.weight, x])``. The nested backward computes the gradient of the unsharded
``a.weight``, and the hooks of its unit reduce it. Then the outer backward computes the gradient of ``x``.

*In torch:* the flat parameter is also the leaf of the graph. ``fully_shard`` computes nothing and raises no error.

Spec: PROG-20, PROG-30.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from minifsdp.engine.messages import message
from minifsdp.engine.precision import map_tensors, tensors_in
from minifsdp.engine.unit import Unit


class RequestedParameters:
    """The registered parameters of one root, and the node at its outputs.

    Args:
        units: the units of the root.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._parameters = [parameter for unit in units for parameter in unit.layout.local_parameters()]
        # No user requests this tensor, so autograd reaches its node only in a backward that requests nothing.
        self._unrequested = torch.zeros(0, requires_grad=True)
        self._probe = _node_of(self._unrequested)

    def watch_output(self, output: Any) -> Any:
        """Called after a recorded forward of the root; returns the output to pass to the caller."""
        watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf]
        if not watched or torch._C._are_functorch_transforms_active():
            return output
        # Autograd would call the hooks of a registered parameter without a gradient.
        registered = [parameter for parameter in self._parameters if not parameter._backward_hooks]
        path = _Path.apply(self._unrequested, *registered)  # type: ignore[no-untyped-call]
        passed = {id(tensor): _Identity.apply(self, tensor, path) for tensor in watched}  # type: ignore[no-untyped-call]
        return map_tensors(lambda tensor: passed.get(id(tensor), tensor), output)

    def compute(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        """Computes the requested gradients in a nested backward. Does nothing in a backward that requests nothing.

        Args:
            edge: where the graph of the root's module begins.
            gradient: the gradient of the output there.
        """
        is_requested = torch._C._will_engine_execute_node
        if is_requested(self._probe):
            return
        leaves = []
        for unit in self._units:
            trained = [(n, p) for n, p in enumerate(unit.layout.local_parameters()) if p.requires_grad]
            try:
                numbers = [n for n, p in trained if is_requested(_node_of(p))]
            except RuntimeError as error:
                # Raised for a parameter that is requested with `autograd.grad`.
                raise RuntimeError(message("autograd-grad", unit=unit.name)) from error
            if numbers and torch.is_grad_enabled():
                raise RuntimeError(message("graph-of-gradients", unit=unit.name))
            leaves += unit.layout.leaves_of(numbers) if numbers else []
        if leaves:
            torch.autograd.backward([edge], [gradient], retain_graph=True, inputs=leaves)


def _node_of(parameter: torch.Tensor) -> Any:
    """The node that accumulates the gradient of a leaf tensor."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class _Path(torch.autograd.Function):
    """Connects tensors to the graph, without a gradient for them."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.num_tensors = len(tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        return (None,) * ctx.num_tensors


class _Identity(torch.autograd.Function):
    """The node at an output of the root. The output shares its memory and its version with ``tensor``."""

    @staticmethod
    def forward(ctx: Any, requested: RequestedParameters, tensor: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        ctx.requested = requested
        # Not ``tensor`` itself: autograd would not allow the caller to change it in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.requested.compute(GradientEdge(*ctx.next_functions[0]), gradient)
        return None, gradient, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor, __: None) -> torch.Tensor:
        return tangent.view_as(tangent)
