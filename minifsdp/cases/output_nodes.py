"""Nodes of the autograd graph at the outputs of a module, for the cases that need one.

`through_nodes` passes each tensor of an output through a node, and keeps the structure of the output. A tensor that is
a view of another output gets no node: it must stay a view, because the caller may change one of them in place.

Worked example: the output ``(a, a[0], b)``. ``a`` and ``b`` get a node. ``a[0]`` stays the view of ``a``.

*In torch:* no such nodes.

Spec: PROG-20, PROG-30, PROG-99 to PROG-102.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from minifsdp.cases.containers import map_tensors
from minifsdp.engine.precision import tensors_in


def through_nodes(
    pass_through: Callable[[torch.Tensor, bool], torch.Tensor],
    output: Any,
    *,
    skips_used: bool,
) -> Any:
    """Passes the tensors of ``output`` through nodes.

    Args:
        pass_through: adds a node to a tensor. Also gets whether other outputs were computed from the tensor.
        output: the output of a module.
        skips_used: whether an output from which others were computed gets no node.

    Returns:
        The output with the new tensors, or ``output`` itself if nothing has changed.
    """
    outputs = {
        id(tensor): tensor
        for tensor in tensors_in(output)
        if tensor.grad_fn is not None
    }
    # A view of another output must stay a view of it, because the caller may change one of them in place.
    edges = {
        key: get_gradient_edge(t)[:2]
        for key, t in outputs.items()
        if id(t._base) not in outputs
    }
    used = (
        _used_by_others(set(edges.values())) if skips_used and len(edges) > 1 else set()
    )
    passed = {
        key: pass_through(outputs[key], bool(used))
        for key, edge in edges.items()
        if edge not in used
    }
    if all(id(tensor) == key for key, tensor in passed.items()):
        return output
    return map_tensors(lambda tensor: passed.get(id(tensor), tensor), output)


def _used_by_others(outputs: set[tuple[Any, int]]) -> set[tuple[Any, int]]:
    """The outputs from which others were computed. Only searches nodes that are newer than the oldest output."""
    used = set()
    seen = set()
    left = [node for node, _ in outputs]
    oldest = min(node._sequence_nr() for node in left)
    while left:
        if (node := left.pop()) not in seen:
            seen.add(node)
            newer = [
                edge
                for edge in node.next_functions
                if edge[0] and edge[0]._sequence_nr() >= oldest
            ]
            used |= outputs.intersection(newer)
            left += [node for node, _ in newer]
    return used


def with_node(output: torch.Tensor, *paths: torch.Tensor) -> torch.Tensor:
    """Adds a node to ``output`` that has a path to ``output`` and to ``paths``. Only ``output`` gets a gradient."""
    # Autograd may have saved the output, whose values do not change.
    with torch.autograd._unsafe_preserve_version_counter(output):
        return _Identity.apply(output, *paths)  # type: ignore[no-any-return, no-untyped-call]


class _Identity(torch.autograd.Function):
    """The node at an output, whose other inputs get no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *paths: torch.Tensor) -> torch.Tensor:
        ctx.num_paths = len(paths)
        ctx.set_materialize_grads(False)
        ctx.is_same = (
            type(tensor) is torch.Tensor
            and tensor._base is None
            and forward_ad._current_level < 0
        )
        if ctx.is_same:
            # The module may keep the tensor, or return it twice: changes in place must reach all of these places.
            ctx.mark_dirty(tensor)
            return tensor
        # Not ``tensor`` itself: autograd would not allow the caller to change it in place.
        return tensor.detach()

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return gradient, *(None,) * ctx.num_paths

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *paths: None) -> torch.Tensor:
        return tangent if ctx.is_same else tangent.view_as(tangent)
