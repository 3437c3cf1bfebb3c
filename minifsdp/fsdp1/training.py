"""The methods of a wrapper that a training loop calls in addition to ``forward``.

Each method handles all units of a tree: it sets an option on them or reads from them. Worked example: ``no_sync`` on
two ranks sets ``reduces = False`` on every unit, so each rank accumulates unsharded local gradients in the backwards
inside it. The first backward after it reduces the sum.

*In torch:* the code is in the methods of the wrapper class.

Spec: NOSYNC, SUMMON, APPLY, CLIP, HOOK, FWD-08.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import nn

from minifsdp.arguments import FUNCTION, HOOK, MODULE, NUMBER, require
from minifsdp.engine import optimizer_watch
from minifsdp.engine.flat_tensor import local_tensor
from minifsdp.engine.messages import message
from minifsdp.fsdp1.build import HYBRID
from minifsdp.fsdp1.clipping import clip_gradients, gradient_parts, groups_of
from minifsdp.fsdp1.full_params import check_not_running, check_summon_options, summoned
from minifsdp.fsdp1.wrapper import Wrapper


class TrainingMethods(Wrapper):
    """Base class of `minifsdp.FullyShardedDataParallel` with the methods for training loops."""

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulates gradients without reduction; the first backward after it reduces the sum (NOSYNC-01 to 10).

        Inside, ``.grad`` has the size of the unsharded unit. Every rank must enter and exit it at the same backward.

        Raises:
            RuntimeError: if this is not the root.
        """
        self._only_on_the_root("no_sync()")
        units = self._current_root_state().units
        before = [(unit.policy.reduces, unit.policy.reshard_after_backward) for unit in units]
        for unit in units:
            # A unit that stays unsharded between forward and backward stays unsharded until the backward that reduces.
            unit.choose(reduces=False, reshard_after_backward=unit.policy.reshard_after_forward)
        try:
            yield
        finally:
            for unit, (reduces, reshards) in zip(units, before, strict=True):
                unit.choose(reduces=reduces, reshard_after_backward=reshards)

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Unshards all units in ``module`` inside the context, in the stored dtype (SUMMON-01 to 20).

        Names of parameters have no wrapper prefixes inside. All ranks must enter and exit it. Do not run a forward or
        a backward inside.

        Args:
            module: the module to search for units; it need not be a wrapper itself.
            recurse: whether to include units inside ``module``'s own unit.
            writeback: whether changes persist. Each rank writes back only its own shard.
            rank0_only: whether only the first rank has full parameters.
            offload_to_cpu: whether the full parameters are on the CPU; no effect on units that are not sharded.
            with_grads: whether ``.grad`` is all-gathered too; needs ``use_orig_params=True``.

        Raises:
            NotImplementedError: if the options cannot be combined.
            RuntimeError: if a unit is busy or already summoned.
        """
        require(MODULE, "summon_full_params", module=module)
        choices = {"writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
        return _full_params(module, recurse, **choices, with_grads=with_grads)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Calls ``fn`` on every submodule and on itself, children first, with full parameters (APPLY-01).

        All ranks must call it.

        Raises:
            RuntimeError: if called inside ``summon_full_params``.
        """
        require(FUNCTION, "apply", fn=fn)
        with TrainingMethods.summon_full_params(self, recurse=False):
            return super().apply(fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, also of unsharded units whose modules have views instead of parameters (FWD-08)."""
        super().zero_grad(set_to_none)
        for wrapper in Wrapper.fsdp_modules(self):
            for parameter in wrapper._unit.layout.local_parameters() if wrapper._unit is not None else []:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int | str = 2.0) -> torch.Tensor:
        """Scales all gradients so that their total norm, as one vector, is at most ``max_norm`` (CLIP-01 to 10).

        Every rank must call it, even a rank without gradients; otherwise the other ranks wait.

        Returns:
            The norm before clipping, the same on all ranks.

        Raises:
            RuntimeError: if this is not the root, full parameters are summoned, or there are gradients that were never
                reduced.
        """
        require(NUMBER, "clip_grad_norm_", max_norm=max_norm, norm_type=norm_type)
        self._only_on_the_root("clip_grad_norm_()")
        self._current_root_state()
        layouts = [wrapper._unit.layout for wrapper in Wrapper.fsdp_modules(self) if wrapper._unit is not None]
        optimizer_watch.watch.check_reduced("clip_grad_norm_()", layouts)
        parts = [part for layout in layouts for part in gradient_parts(layout)]
        owned = {parameter for layout in layouts for parameter in layout.local_parameters()}
        for parameter in self.parameters():
            if parameter not in owned:
                gradient = None if parameter.grad is None else local_tensor(parameter.grad)
                parts.append((groups_of(parameter), gradient))
        return clip_gradients(parts, float(max_norm), float(norm_type), self.compute_device)

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
        require(HOOK, "register_comm_hook", hook=hook)
        if self._is_inner:
            raise AssertionError(message("hook-root-only"))
        if self._root_state is not None:
            raise RuntimeError(message("hook-too-late"))
        wrappers = Wrapper.fsdp_modules(self)
        # Also with a single replica: on several nodes the same program would raise this error.
        if any(inner.sharding_strategy in HYBRID for inner in wrappers):
            raise AssertionError(message("hook-hybrid"))
        plans = [inner._unit.plan for inner in wrappers if inner._unit is not None]
        if any(plan.hook is not None for plan in plans):
            raise AssertionError(message("hook-twice"))
        for plan in plans:
            plan.hook = functools.partial(hook, state)


@contextmanager
def _full_params(module: nn.Module, recurse: bool, **options: bool) -> Generator[None]:
    check_summon_options(**options)
    wrappers = Wrapper.fsdp_modules(module)
    if not recurse:
        wrappers = [wrapper for wrapper in wrappers if wrapper is module]
    for wrapper in wrappers:
        wrapper._recover_after_error()
        if wrapper._root_state is not None:
            check_not_running(wrapper._root_state)
    units = [wrapper._unit for wrapper in wrappers if wrapper._unit is not None]
    before = [wrapper._shows_clean_names for wrapper in wrappers]
    with summoned(units, **options):
        for wrapper in wrappers:
            wrapper._shows_clean_names = True
        try:
            yield
        finally:
            for wrapper, shown in zip(wrappers, before, strict=True):
                wrapper._shows_clean_names = shown
