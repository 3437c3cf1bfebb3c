"""The methods of a wrapper that a training loop calls beside ``forward``.

Each acts on a whole tree: it goes over the units and sets a switch or asks them for something. Worked example:
``no_sync`` on two ranks sets ``reduces = False`` on every unit, so that a backward inside keeps each rank's own full
gradient; the first one outside reduces the sum.

*In torch:* the same methods, on the wrapper class itself.

Spec: NOSYNC, SUMMON, APPLY, CLIP, HOOK.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, Self

import torch
from torch import nn

from minifsdp.engine import optimizer_watch
from minifsdp.engine.messages import message
from minifsdp.engine.partition import Form, local_part
from minifsdp.fsdp1.build import HYBRID
from minifsdp.fsdp1.full_params import check_not_running, check_summon_options, summoned
from minifsdp.fsdp1.training_aids import clip_gradients, gradient_parts
from minifsdp.fsdp1.wrapper import Wrapper


class TrainingMethods(Wrapper):
    """What a training loop asks of a tree of wrappers."""

    # --- accumulation ---

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Backwards inside leave their gradients unreduced; the first one after it reduces the sum (NOSYNC-01 to 10).

        Inside, ``.grad`` has the size of the whole unit. Every rank must enter and leave it at the same backward.

        Raises:
            RuntimeError: this is not the root.
        """
        self._only_on_the_root("no_sync()")
        units = self._current_tree().units
        before = [(unit.policy.reduces, unit.policy.reshard_after_backward) for unit in units]
        for unit in units:
            # A unit that is kept between forward and backward is kept until the backward that reduces.
            unit.choose(reduces=False, reshard_after_backward=unit.policy.reshard_after_forward)
        try:
            yield
        finally:
            for unit, (reduces, frees) in zip(units, before, strict=True):
                unit.choose(reduces=reduces, reshard_after_backward=frees)

    # --- full parameters ---

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None]:
        """Inside, every unit below ``module`` shows its full parameters in the stored dtype (SUMMON-01 to 20).

        All ranks must enter and leave it. Neither forward nor backward may be started inside.

        Args:
            module: where to begin; it need not be a wrapper itself.
            recurse: whether units below ``module``'s own are summoned too.
            writeback: whether changes persist, each rank's in its own shard.
            rank0_only: the first rank alone sees full parameters.
            offload_to_cpu: they are on the CPU, if they are sharded.
            with_grads: ``.grad`` is gathered too; needs ``use_orig_params=True``.

        Raises:
            NotImplementedError: the options do not go together.
            RuntimeError: a unit is busy, or summoned already.
        """
        options = {
            "writeback": writeback,
            "rank0_only": rank0_only,
            "offload_to_cpu": offload_to_cpu,
            "with_grads": with_grads,
        }
        check_summon_options(**options)
        wrappers = Wrapper.fsdp_modules(module)
        if not recurse:
            wrappers = [wrapper for wrapper in wrappers if wrapper is module]
        for wrapper in wrappers:
            wrapper._mend()
            if wrapper._tree is not None:
                check_not_running(wrapper._tree)
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

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Calls ``fn`` on every submodule and on itself, children first, each unit with full parameters (APPLY-01).

        All ranks must call it.

        Raises:
            RuntimeError: inside ``summon_full_params``.
        """
        with TrainingMethods.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    # --- clipping ---

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int | str = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm, seen as one vector, is at most ``max_norm`` (CLIP-01 to 10).

        Every rank must call it, also one that has no gradients: a rank that does not lets the others wait.

        Returns:
            The norm before clipping, the same on all ranks.

        Raises:
            RuntimeError: this is not the root, full parameters are summoned, or there are gradients that were never
                reduced.
        """
        self._only_on_the_root("clip_grad_norm_()")
        self._current_tree()
        layouts = [w._unit.layout for w in Wrapper.fsdp_modules(self) if w._unit is not None]
        optimizer_watch.check_reduced("clip_grad_norm_()", layouts)
        parts = [part for layout in layouts for part in gradient_parts(layout)]
        owned = {parameter for layout in layouts for parameter in layout.local_parameters()}
        for parameter in self.parameters():
            if parameter not in owned:
                gradient = None if parameter.grad is None else local_part(parameter.grad)
                parts.append((Form.of(parameter).groups, gradient))
        return clip_gradients(parts, float(max_norm), float(norm_type), self.compute_device)

    # --- communication hook ---

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replaces how gradients are combined, for all units of the tree (HOOK-01 to 10).

        A sharded unit calls ``hook(state, grad, out)``: ``grad`` is its padded, unsharded flat gradient, ``out`` this
        rank's piece, to be filled. A unit that is not sharded calls ``hook(state, grad)``, to be changed in place. To
        be called once, on every rank, before the first forward.

        Raises:
            AssertionError: not on the root, a hybrid strategy, or there is a hook already.
            ValueError: ``hook`` is not callable.
            RuntimeError: forward has been run already.
        """
        if self._is_inner:
            raise AssertionError(message("hook-root-only"))
        if self._tree is not None:
            raise RuntimeError(message("hook-too-late"))
        wrappers = Wrapper.fsdp_modules(self)
        # Also where there are no copies: on more nodes it would be refused.
        if any(wrapper.sharding_strategy in HYBRID for wrapper in wrappers):
            raise AssertionError(message("hook-hybrid"))
        units = [wrapper._unit for wrapper in wrappers if wrapper._unit is not None]
        for unit in units:
            if unit.plan.hook is not None:
                raise AssertionError(message("hook-twice"))
        for unit in units:
            unit.plan.hook = functools.partial(hook, state)
