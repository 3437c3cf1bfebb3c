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

The outputs of an inner unit pass through such a node as well, if the module has recorded a newer operation, for example
a penalty on its weights that it appends to a list of the program. Autograd runs the newest node first. So without the
node, the backward of the penalty would read the weights before the pre-backward hook of the output runs.

*In torch:* the flat parameter is also the leaf of the graph. ``fully_shard`` computes nothing and raises no error.

Spec: PROG-20, PROG-30, PROG-99 to PROG-102.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minifsdp.engine.layout import ParameterHook, users_hooks
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message
from minifsdp.engine.precision import map_tensors, tensors_in
from minifsdp.engine.unit import Unit

# The number that autograd gives to the next node of this thread.
next_number: Callable[[], int] = torch.autograd._get_sequence_nr


class RequestedParameters:
    """The registered parameters of one root, and the nodes at its outputs.

    Args:
        units: the units of the root.
    """

    @outside_inference_mode
    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        # No user requests this tensor, so autograd only reaches its node in a backward that requests nothing.
        self._unrequested = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)
        self._probe = get_gradient_edge(self._unrequested).node
        self._paths = [self._unrequested, *(p for unit in units for p in unit.layout.local_parameters())]

    def watch_output(self, output: Any) -> Any:
        """Called after a recorded forward of the root; returns the output to pass to the caller."""
        is_plain = isinstance(output, torch.Tensor | tuple | list | dict)
        return _passed(self._watch, output, skips_used=True) if is_plain else output

    def _watch(self, output: torch.Tensor, is_used: bool) -> torch.Tensor:
        edge = get_gradient_edge(output)
        passed = _with_node(output, *self._paths)
        passed.register_hook(partial(self._compute, edge, is_used))
        return passed

    def _compute(self, edge: GradientEdge, is_used: bool, gradient: torch.Tensor | None) -> None:
        """Computes the requested gradients in a nested backward. Does nothing in a backward that requests nothing.

        Args:
            edge: where the graph of the root's module begins.
            is_used: whether the module has computed outputs from other outputs.
            gradient: the gradient of the output there, if there is one.
        """
        for hooks in [h for p in self._paths for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]:
            hooks.update({key: ParameterHook(hook) for key, hook in users_hooks(hooks)})
        is_requested, inputs = torch._C._will_engine_execute_node, []
        for unit in self._units if not is_requested(self._probe) else ():
            leaves, parameters = unit.layout.leaves, unit.layout.local_parameters()
            trained = [p for p in parameters if p.requires_grad]
            try:
                requested = {p for p in trained if is_requested(get_gradient_edge(p).node)}
            except RuntimeError as error:
                # Raised for a parameter that is requested with `autograd.grad`.
                raise RuntimeError(message("autograd-grad", unit=unit.name)) from error
            if unit.layout.shards_are_distributed:
                # Each parameter has its own leaf.
                leaves = [leaf for leaf, p in zip(leaves, parameters, strict=True) if p in requested]
            elif 0 < len(requested) < len(trained):
                raise RuntimeError(message("part-of-unit", unit=unit.name, num=len(requested), number=len(trained)))
            inputs += leaves if requested else []
        if inputs and is_used:
            raise RuntimeError(message("requested-of-outputs", unit=self._units[0].name))
        if inputs and gradient is not None:
            # With ``create_graph=True``, the hooks of the units raise the error.
            create_graph = torch.is_grad_enabled()
            torch.autograd.backward([edge], [gradient], retain_graph=True, create_graph=create_graph, inputs=inputs)


def with_newest_node(output: Any) -> Any:
    """Called after a forward of a unit that is resharded; returns the output to pass to the caller."""
    for tensor in [output] if isinstance(output, torch.Tensor) else tensors_in(output):
        if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() == next_number() - 1:
            return output
    if not torch.is_grad_enabled():
        return output
    return _passed(lambda tensor, _: _with_node(tensor), output, skips_used=False)


def _passed(pass_through: Callable[[torch.Tensor, bool], torch.Tensor], output: Any, *, skips_used: bool) -> Any:
    outputs = {id(tensor): tensor for tensor in tensors_in(output) if tensor.grad_fn is not None}
    # A view of another output must stay a view of it, because the caller may change one of them in place.
    edges = {key: get_gradient_edge(t)[:2] for key, t in outputs.items() if id(t._base) not in outputs}
    used = _used_by_others(set(edges.values())) if skips_used and len(edges) > 1 else set()
    passed = {key: pass_through(outputs[key], bool(used)) for key, edge in edges.items() if edge not in used}
    if all(id(tensor) == key for key, tensor in passed.items()):
        return output
    return map_tensors(lambda tensor: passed.get(id(tensor), tensor), output)


def _used_by_others(outputs: set[tuple[Any, int]]) -> set[tuple[Any, int]]:
    """The outputs from which others were computed. Only searches nodes that are newer than the oldest output."""
    used, seen, left = set(), set(), [node for node, _ in outputs]
    oldest = min(node._sequence_nr() for node in left)
    while left:
        if (node := left.pop()) not in seen:
            seen.add(node)
            newer = [edge for edge in node.next_functions if edge[0] and edge[0]._sequence_nr() >= oldest]
            used |= outputs.intersection(newer)
            left += [node for node, _ in newer]
    return used


def _with_node(output: torch.Tensor, *paths: torch.Tensor) -> torch.Tensor:
    # Autograd may have saved the output, whose values do not change.
    with torch.autograd._unsafe_preserve_version_counter(output):
        return _Identity.apply(output, *paths)  # type: ignore[no-any-return, no-untyped-call]


class _Identity(torch.autograd.Function):
    """The node at an output, whose other inputs get no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *paths: torch.Tensor) -> torch.Tensor:
        ctx.num_paths = len(paths)
        ctx.set_materialize_grads(False)
        ctx.is_same = type(tensor) is torch.Tensor and tensor._base is None and forward_ad._current_level < 0
        if ctx.is_same:
            # The module may keep the tensor, or return it twice: changes in place must reach all of these places.
            ctx.mark_dirty(tensor)
            return tensor
        # Not ``tensor`` itself: autograd would not allow the caller to change it in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradient, *(None,) * ctx.num_paths

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *paths: None) -> torch.Tensor:
        return tangent if ctx.is_same else tangent.view_as(tangent)
