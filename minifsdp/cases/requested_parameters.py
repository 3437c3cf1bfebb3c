"""Detects a backward that requests gradients of registered parameters, and computes them.

``loss.backward(inputs=parameters)`` and ``autograd.grad(loss, parameters)`` only execute the nodes of the graph that
lead to the requested tensors. Users pass the *registered* parameters, but the leaves of the graph are other tensors,
the unsharded parameters. So autograd would find no path, compute nothing and raise no error.

Therefore each output of the root passes through a node, which has a path to all registered parameters::

    loss ... output --(node)-- output of the root's module ... unsharded parameters
                       |
                       +----- registered parameters

The node is the identity. It sends no gradient to the registered parameters, so a plain backward works as without it. In
a backward that requests registered parameters, autograd executes the node. A hook of it then runs a nested backward
that requests the unsharded parameters instead, with all hooks of the units. A gradient of ``autograd.grad`` is returned
and not accumulated. A shard cannot be returned in this way, so this raises an error.

Worked example: ``backward(inputs=[shard of a.weight, x])``. The nested backward computes the gradient of the unsharded
``a.weight``, and the hooks of its unit reduce it. Then the outer backward computes the gradient of ``x``.

Autograd calls the hooks of a registered parameter when it executes the node, in each backward, and without a gradient.
A `ParameterHook` replaces each hook before, and ignores this call. The user may have registered the hook at any time.

An output from which the module has computed other outputs, for example a hidden state, gets no node. The program may
need its gradient, and the graph of the other outputs would not contain the node. So a loss of such an output has no
path to the registered parameters, and a backward that requests them raises an error.

Without this case, ``loss.backward(inputs=parameters)`` computes no gradient and raises no error.

*In torch:* the flat parameter is also the leaf of the graph. ``fully_shard``, and FSDP1 with ``use_orig_params``,
compute no gradient and raise no error.

Spec: PROG-20, PROG-21, PROG-22.
"""

from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minifsdp.cases.output_nodes import through_nodes, with_node
from minifsdp.engine.layout import ParameterHook, users_hooks
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message
from minifsdp.engine.root import RootState


class RequestedParameters:
    """The registered parameters of one root, and the nodes at its outputs.

    Args:
        root_state: the root.
    """

    @outside_inference_mode
    def __init__(self, root_state: RootState) -> None:
        self._units = root_state.units
        self._iteration = root_state.iteration
        # No user requests this tensor, so autograd only reaches its node in a backward that requests nothing.
        self._unrequested = torch.zeros(
            0, dtype=torch.float32, device="cpu", requires_grad=True
        )
        self._probe = get_gradient_edge(self._unrequested).node
        self._paths = [
            self._unrequested,
            *(p for unit in self._units for p in unit.layout.local_parameters),
        ]
        root_state.iteration.points.forward_ends.append(self.watch_output)

    def watch_output(self, output: Any) -> Any:
        """Called after a forward of the root; returns the output to pass to the caller."""
        if self._iteration.is_recorded and isinstance(
            output, torch.Tensor | tuple | list | dict
        ):
            return through_nodes(self._watch, output, skips_used=True)
        return output

    def _watch(self, output: torch.Tensor, is_used: bool) -> torch.Tensor:
        edge = get_gradient_edge(output)
        passed = with_node(output, *self._paths)
        passed.register_hook(partial(self._compute, edge, is_used))
        return passed

    def _compute(
        self, edge: GradientEdge, is_used: bool, gradient: torch.Tensor | None
    ) -> None:
        """Computes the requested gradients in a nested backward. Does nothing in a backward that requests nothing.

        Args:
            edge: where the graph of the root's module begins.
            is_used: whether the module has computed outputs from other outputs.
            gradient: the gradient of the output there, if there is one.
        """
        for hooks in [
            h
            for p in self._paths
            for h in (p._backward_hooks, p._post_accumulate_grad_hooks)
            if h
        ]:
            hooks.update({key: ParameterHook(hook) for key, hook in users_hooks(hooks)})
        is_requested = torch._C._will_engine_execute_node
        inputs = []
        for unit in self._units if not is_requested(self._probe) else ():
            leaves = unit.layout.leaves
            parameters = unit.layout.local_parameters
            trained = [p for p in parameters if p.requires_grad]
            try:
                requested = {
                    p for p in trained if is_requested(get_gradient_edge(p).node)
                }
            except RuntimeError as error:
                # Raised for a parameter that is requested with `autograd.grad`.
                raise RuntimeError(message("autograd-grad", unit=unit.name)) from error
            if unit.layout.shards_are_dtensors:
                # Each parameter has its own leaf.
                leaves = [
                    leaf
                    for leaf, p in zip(leaves, parameters, strict=True)
                    if p in requested
                ]
            elif 0 < len(requested) < len(trained):
                raise RuntimeError(
                    message(
                        "part-of-unit",
                        unit=unit.name,
                        num=len(requested),
                        number=len(trained),
                    )
                )
            inputs += leaves if requested else []
        if inputs and is_used:
            raise RuntimeError(
                message("requested-of-outputs", unit=self._units[0].name)
            )
        if inputs and gradient is not None:
            # With ``create_graph=True``, the hooks of the units raise the error.
            torch.autograd.backward(
                [edge],
                [gradient],
                retain_graph=True,
                create_graph=torch.is_grad_enabled(),
                inputs=inputs,
            )
