"""The methods of a wrapper that a training loop calls in addition to ``forward``.

Each method handles all units of a tree: it sets an option on them or reads from them. Worked example: ``no_sync`` on
two ranks sets ``reduces = False`` on every unit. In backwards inside the context, each rank accumulates unsharded local
gradients. The first backward after the context reduces the sum.

``clip_grad_norm_`` clips by the norm of all gradients. The norm of a sharded gradient vector is not the sum of the
shards' norms, and not the norm of one shard. But the p-th *powers* of the norms add up::

    rank 0 has [3 0], rank 1 has [0 4]         local norms 3 and 4
    2-norm of [3 0 0 4]                        (3**2 + 4**2) ** (1/2) = 5

So each rank sums the powers for its shards, one all-reduce sums this number over the ranks, and then each rank takes
the p-th root. For the maximum norm, the all-reduce takes the maximum. Gradients that are unsharded on every rank (those
of ignored parameters, and of units that are not sharded) are added once, after the all-reduce.

``torch.nn.utils.clip_grad_norm_`` uses only the local shards. In the example it would use norm 3 on rank 0 and norm 4
on rank 1, and the ranks would silently diverge.

Offloaded gradients are on the CPU. Each copy between the CPU and an accelerator makes the CPU wait. So all norms of one
device are copied together, and the clipping factor is copied back once.

*In torch:* the code is in the methods of the wrapper class. ``clip_grad_norm_`` has one all-reduce over the root's
group for all units.

Spec: NOSYNC, SUMMON, APPLY, CLIP, HOOK, FWD-08, HYB-09, NOSYNC-10, STREAM-14.
"""

import functools
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from minifsdp.cases.summoned_gradients import SummonedGradients
from minifsdp.checks import arguments, ownership
from minifsdp.checks.arguments import require
from minifsdp.engine.exchange import call
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message, rank_of_this_process, warn
from minifsdp.engine.shards import local_tensor
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import HYBRID_SHARDING_STRATEGIES
from minifsdp.fsdp1.full_params import UnitIsBusyError, summoned
from minifsdp.fsdp1.wrapper import Wrapper, units_in


class TrainingMethods(Wrapper):
    """A wrapper with the methods that a training loop calls."""

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulates gradients without reduction; the first backward after it reduces the sum (NOSYNC-01 to 10).

        Inside it, ``.grad`` has the size of the unsharded unit. Every rank must enter and exit it at the same backward.

        Raises:
            RuntimeError: if this is not the root.
        """
        self._only_on_the_root("no_sync()")
        self._current_root_state()
        units = [
            (one._unit, one._reshards)
            for one in Wrapper.fsdp_modules(self)
            if one._unit is not None
        ]
        before = [unit.policy for unit, _ in units]
        for unit, reshards in units:
            # A strategy that keeps units between forward and backward also keeps them until the backward that reduces.
            unit.update_policy(reduces=False, reshard_after_backward=reshards)
        try:
            yield
        finally:
            for (unit, _), policy in zip(units, before, strict=True):
                unit.update_policy(
                    reduces=policy.reduces,
                    reshard_after_backward=policy.reshard_after_backward,
                )

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None]:
        """Unshards all units in ``module`` inside the context, in the stored dtype (SUMMON-01 to 20).

        All ranks must enter and exit it. Inside the context, names have no wrapper prefixes. A forward inside it uses
        the full parameters, in the stored dtype (PROG-01). A backward of this forward raises an error.

        Args:
            module: the module to search for units; it need not be a wrapper itself.
            recurse: whether to include units inside ``module``'s own unit.
            writeback: whether changes persist. Each rank writes back only its own shard.
            rank0_only: whether only the first rank has full parameters.
            offload_to_cpu: whether the full parameters are on the CPU. It has no effect on units that are not sharded.
            with_grads: whether ``.grad`` is all-gathered too. This needs ``use_orig_params=True``.

        Raises:
            NotImplementedError: if the options cannot be combined.
            RuntimeError: if a unit is busy or already summoned.
        """
        require(arguments.MODULE, "summon_full_params", module=module)
        wrappers = [
            wrapper
            for wrapper in Wrapper.fsdp_modules(module)
            if recurse or wrapper is module
        ]
        for wrapper in wrappers:
            wrapper._recover_after_error()
            if wrapper._root_state is not None and wrapper._root_state.is_busy:
                raise UnitIsBusyError(message("summon-while-running", idle=Phase.IDLE))
        before = [wrapper._shows_clean_names for wrapper in wrappers]
        with summoned(
            [wrapper._unit for wrapper in wrappers if wrapper._unit is not None],
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            gradients_of=SummonedGradients if with_grads else None,
        ):
            for wrapper in wrappers:
                wrapper._shows_clean_names = True
            try:
                yield
            finally:
                for wrapper, shown in zip(wrappers, before, strict=True):
                    wrapper._shows_clean_names = shown
                    if wrapper._root_state is not None and wrapper._unit is not None:
                        for (
                            extend
                        ) in wrapper._root_state.iteration.points.values_written:
                            extend(wrapper._unit)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Calls ``fn`` on all submodules and on itself, children first, with full parameters; on all ranks (APPLY-01).

        Raises:
            RuntimeError: if called inside ``summon_full_params``.
        """
        require(arguments.FUNCTION, "apply", fn=fn)
        with TrainingMethods.summon_full_params(self, recurse=False):
            return super().apply(fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, including those of units that are currently unsharded (FWD-08)."""
        super().zero_grad(set_to_none)
        # The modules of an unsharded unit have views instead of its parameters.
        for parameter in (
            one for unit in units_in(self) for one in unit.layout.local_parameters
        ):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                # Inside `no_sync`, its size differs from that of the parameter, so it cannot be assigned again.
                parameter.grad.zero_()

    def clip_grad_norm_(
        self, max_norm: float | int, norm_type: float | int | str = 2.0
    ) -> torch.Tensor:
        """Scales all gradients so that their total norm, as one vector, is at most ``max_norm`` (CLIP-01 to 10).

        Every rank must call it, even a rank without gradients; otherwise the other ranks wait.

        Returns:
            The norm before clipping, the same on all ranks.

        Raises:
            RuntimeError: if this is not the root, full parameters are summoned, or a gradient was never reduced.
        """
        require(
            arguments.NUMBER, "clip_grad_norm_", max_norm=max_norm, norm_type=norm_type
        )
        self._only_on_the_root("clip_grad_norm_()")
        layouts = [unit.layout for unit in units_in(self)]
        ownership.check_reduced("clip_grad_norm_()", layouts)
        owned = {
            parameter for layout in layouts for parameter in layout.local_parameters
        }
        parts = [part for layout in layouts for part in gradient_parts(layout)]
        parts += [
            (groups_of(p), None if p.grad is None else local_tensor(p.grad))
            for p in self.parameters()
            if p not in owned
        ]
        return clip_gradients(
            parts, float(max_norm), float(norm_type), self.compute_device
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replaces the gradient reduction of all units of the tree (HOOK-01 to 10).

        A sharded unit calls ``hook(state, grad, out)``: ``grad`` is its padded, unsharded flat gradient, and the hook
        fills ``out``, this rank's shard. A unit that is not sharded calls ``hook(state, grad)``, and the hook modifies
        ``grad`` in place. Call this once, on every rank, before the first forward.

        Raises:
            AssertionError: if this is not the root, the strategy is hybrid, or there is already a hook.
            ValueError: if ``hook`` is not callable.
            RuntimeError: if a forward has already run.
        """
        require(arguments.HOOK, "register_comm_hook", hook=hook)
        if self._is_inner:
            raise AssertionError(message("hook-root-only"))
        wrappers = Wrapper.fsdp_modules(self)
        # Raise this error even with a single replica, because the same program would raise it on several nodes.
        if any(
            inner.sharding_strategy in HYBRID_SHARDING_STRATEGIES for inner in wrappers
        ):
            raise AssertionError(message("hook-hybrid"))
        if any(inner._comm_hook is not None for inner in wrappers):
            raise AssertionError(message("hook-twice"))
        if self._root_state is not None:
            raise RuntimeError(message("hook-too-late"))
        for inner in wrappers:
            inner._comm_hook = hook
            inner._comm_hook_state = state
            if inner._unit is not None:
                inner._unit.plans[0].hook = functools.partial(hook, state)


# ---- gradient clipping ----------------------------------------------------------------------------------------------

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
        gradients = [
            None if flat is None or part.start == part.stop else flat[part]
            for part in layout.sharding.param_ranges(layout.mesh.shard_index)
        ]
    return [
        ((*shard_groups, *groups_of(spec)), part)
        for spec, part in zip(layout.specs, gradients, strict=True)
    ]


def groups_of(sharded: Any) -> tuple[Group, ...]:
    """The groups whose ranks have the other shards of a ``DTensor`` or of its spec. Empty for other values."""
    return tuple(
        Group.of(sharded.device_mesh.get_group(axis))
        for axis, placement in enumerate(getattr(sharded, "placements", ()))
        if placement.is_shard()
    )


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
    # The norm over a group is the root of the sum of powers, or the maximum.
    is_maximum = norm_type == math.inf
    exponent = 1.0 if is_maximum else norm_type
    operation = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
    for group in groups:
        power = norm**exponent
        call(
            dist.all_reduce,
            group,
            power,
            operation,
            about=f" of the {float(norm_type)}-norm",
        )
        norm = power ** (1.0 / exponent)
    return norm
