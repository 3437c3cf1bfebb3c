"""The methods of a wrapper that a training loop calls in addition to ``forward``.

Each method handles all units of a tree: it sets an option on them or reads from them. Worked example: ``no_sync`` on
two ranks sets ``reduces = False`` on every unit. In backwards inside the context, each rank accumulates unsharded local
gradients. The first backward after the context reduces the sum.

*In torch:* the code is in the methods of the wrapper class.

Spec: NOSYNC, SUMMON, APPLY, CLIP, HOOK, FWD-08.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from minifsdp.cases.summoned_gradients import SummonedGradients
from minifsdp.checks import arguments, ownership
from minifsdp.checks.arguments import require
from minifsdp.engine.messages import message
from minifsdp.engine.shards import local_tensor
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import HYBRID_SHARDING_STRATEGIES
from minifsdp.fsdp1.full_params import UnitIsBusyError, summoned
from minifsdp.fsdp1.training_aids import clip_gradients, gradient_parts, groups_of
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
        wrappers = [
            (one._unit, one._reshards)
            for one in Wrapper.fsdp_modules(self)
            if one._unit is not None
        ]
        before = [
            (unit, unit.policy.reduces, unit.policy.reshard_after_backward)
            for unit, _ in wrappers
        ]
        for unit, reshards in wrappers:
            # A strategy that keeps units between forward and backward also keeps them until the backward that reduces.
            unit.update_policy(reduces=False, reshard_after_backward=reshards)
        try:
            yield
        finally:
            for unit, reduces, reshards in before:
                unit.update_policy(reduces=reduces, reshard_after_backward=reshards)

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
        wrappers = Wrapper.fsdp_modules(module)
        if not recurse:
            wrappers = [wrapper for wrapper in wrappers if wrapper is module]
        for wrapper in wrappers:
            wrapper._recover_after_error()
            if wrapper._root_state is not None and wrapper._root_state.is_busy:
                raise UnitIsBusyError(message("summon-while-running", idle=Phase.IDLE))
        units = [wrapper._unit for wrapper in wrappers if wrapper._unit is not None]
        before = [wrapper._shows_clean_names for wrapper in wrappers]
        with summoned(
            units,
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
        parts = [part for layout in layouts for part in gradient_parts(layout)]
        owned = {
            parameter for layout in layouts for parameter in layout.local_parameters
        }
        for parameter in self.parameters():
            if parameter not in owned:
                gradient = (
                    None if parameter.grad is None else local_tensor(parameter.grad)
                )
                parts.append((groups_of(parameter), gradient))
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
