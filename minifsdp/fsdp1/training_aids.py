"""Gradient clipping by the norm of all gradients.

The norm of a sharded gradient vector is not the sum of the shards' norms, and not the norm of one shard. But the p-th
*powers* of the norms add up::

    rank 0 has [3 0], rank 1 has [0 4]         local norms 3 and 4
    2-norm of [3 0 0 4]                        (3**2 + 4**2) ** (1/2) = 5

So each rank sums the powers for its shards, one all-reduce sums this number over the ranks, and then each rank takes
the p-th root. For the maximum norm, the all-reduce takes the maximum. Gradients that are unsharded on every rank (those
of ignored parameters, and of units that are not sharded) are added once, after the all-reduce.

``torch.nn.utils.clip_grad_norm_`` uses only the local shards. In the example it would use norm 3 on rank 0 and norm 4
on rank 1, and the ranks would silently diverge.

*In torch:* the method ``clip_grad_norm_``, with one all-reduce over the root's group for all units.

Offloaded gradients are on the CPU. Each copy between the CPU and an accelerator makes the CPU wait. So all norms of one
device are copied together, and the clipping factor is copied back once.

Spec: CLIP-01 to CLIP-10, HYB-09, NOSYNC-10, STREAM-14.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.engine.exchange import call
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message, rank_of_this_process, warn

# The groups whose ranks have the other shards of a gradient (empty if unsharded), and the local shard, if any.
Part = tuple[tuple[Group, ...], torch.Tensor | None]


def gradient_parts(layout: FlatLayout) -> list[Part]:
    """One part for each gradient, or, if the parameters are DTensors, for each parameter in a flat gradient.

    The groups and their order are the same on every rank.
    """
    shard_groups = () if layout.mesh.shard is None else (layout.mesh.shard,)
    gradients = [parameter.grad for parameter in layout.local_parameters]
    if not layout.is_distributed:
        return [(shard_groups, gradient) for gradient in gradients]
    if not layout.use_orig_params:
        flat = gradients[0]
        ranges = layout.sharding.param_ranges(layout.mesh.shard_index)
        gradients = [
            None if flat is None or part.start == part.stop else flat[part]
            for part in ranges
        ]
    return [
        ((*shard_groups, *groups_of(spec)), part)
        for spec, part in zip(layout.specs, gradients, strict=True)
    ]


def groups_of(sharded: Any) -> tuple[Group, ...]:
    """The groups whose ranks have the other shards of a ``DTensor`` or of its spec. Empty for other values."""
    axes = [
        axis
        for axis, placement in enumerate(getattr(sharded, "placements", ()))
        if placement.is_shard()
    ]
    return tuple(Group.of(sharded.device_mesh.get_group(axis)) for axis in axes)


@torch.no_grad()
def clip_gradients(
    parts: Iterable[Part], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Scales all gradients in place so that their common norm is at most ``max_norm``. All ranks must call it.

    Args:
        parts: all gradients. The groups and their order must be the same on every rank.
        max_norm: the maximum norm.
        norm_type: p of the p-norm; ``math.inf`` for the maximum norm.
        device: the device to compute the norm on.

    Returns:
        The norm before clipping, equal on all ranks, in the dtype that all gradients promote to.
    """
    # Compute in float32 or higher: sums of squares of many float16 numbers can underflow or overflow.
    of_groups: dict[tuple[Group, ...], list[torch.Tensor]] = {}
    for groups, part in parts:
        of_groups.setdefault(groups, []).extend([] if part is None else [part])
    norms = [
        _norm(gradients, norm_type, device, groups)
        for groups, gradients in of_groups.items()
    ]
    norm = _norm(norms, norm_type, device)
    every = [gradient for gradients in of_groups.values() for gradient in gradients]
    if not every:
        warn(
            message(
                "clip-without-gradients", rank=rank_of_this_process(), dtype=norm.dtype
            )
        )
        return norm
    # As in torch: the small constant avoids a division by 0, and the clamp leaves small gradients unchanged.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    factors = {
        place: factor.to(*place)
        for place in {(gradient.device, gradient.dtype) for gradient in every}
    }
    for gradient in every:
        gradient.mul_(factors[gradient.device, gradient.dtype])
    return norm.to(
        functools.reduce(torch.promote_types, (gradient.dtype for gradient in every))
    )


def _norm(
    gradients: Iterable[torch.Tensor],
    norm_type: float,
    device: torch.device,
    groups: Iterable[Group] = (),
) -> torch.Tensor:
    """The norm of gradients whose other shards are on the ranks of ``groups``."""
    of_devices: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        # Compute in the gradient's precision or higher, and then cast to one dtype for the all-reduce.
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        one = torch.linalg.vector_norm(
            gradient.detach(), norm_type, dtype=dtype
        ).float()
        of_devices.setdefault(gradient.device, []).append(one)
    norms = [torch.stack(of_one).to(device) for of_one in of_devices.values()]
    together = (
        torch.cat(norms)
        if norms
        else torch.zeros(1, dtype=torch.float32, device=device)
    )
    norm: torch.Tensor = torch.linalg.vector_norm(together, norm_type)
    for group in groups:
        norm = _sum_over(group, norm, norm_type)
    return norm


def _sum_over(group: Group, local: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm over a group: the root of the sum of powers, or the maximum."""
    is_maximum = norm_type == math.inf
    exponent = 1.0 if is_maximum else norm_type
    power: torch.Tensor = local**exponent
    operation = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
    call(
        dist.all_reduce,
        group,
        power,
        operation,
        about=f" of the {float(norm_type)}-norm",
    )
    return power ** (1.0 / exponent)
