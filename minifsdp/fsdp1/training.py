"""The functions behind the methods of a wrapper that a training loop calls in addition to ``forward``.

Each function handles all units of a tree: it sets an option on them or reads from them. Worked example: ``no_sync`` on
two ranks sets ``reduces = False`` on every unit. In backwards inside the context, each rank accumulates unsharded local
gradients. The first backward after the context reduces the sum.

*In torch:* the code is in the methods of the wrapper class.

Spec: NOSYNC, SUMMON, CLIP, HOOK, FWD-08.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from minifsdp.engine import validation
from minifsdp.engine.messages import message
from minifsdp.engine.shards import local_tensor
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import HYBRID_SHARDING_STRATEGIES
from minifsdp.fsdp1.full_params import UnitIsBusyError, summoned
from minifsdp.fsdp1.training_aids import clip_gradients, gradient_parts, groups_of
from minifsdp.fsdp1.wrapper import Wrapper, units_in


@contextmanager
def no_sync(wrapper: Wrapper) -> Generator[None]:
    """Accumulates unreduced gradients in all units of the tree inside the context.

    Raises:
        RuntimeError: if ``wrapper`` is not the root.
    """
    wrapper._only_on_the_root("no_sync()")
    wrapper._current_root_state()
    wrappers = [(one._unit, one._reshards) for one in Wrapper.fsdp_modules(wrapper) if one._unit is not None]
    before = [(unit, unit.policy.reduces, unit.policy.reshard_after_backward) for unit, _ in wrappers]
    for unit, reshards in wrappers:
        # A strategy that keeps units between forward and backward also keeps them until the backward that reduces.
        unit.update_policy(reduces=False, reshard_after_backward=reshards)
    try:
        yield
    finally:
        for unit, reduces, reshards in before:
            unit.update_policy(reduces=reduces, reshard_after_backward=reshards)


@contextmanager
def full_params(module: nn.Module, recurse: bool, **options: bool) -> Generator[None]:
    """Unshards the units of the wrappers in ``module`` inside the context, and removes prefixes from their names.

    Args:
        module: the module.
        recurse: whether to include wrappers inside ``module``.
        **options: the options of `summoned`.

    Raises:
        NotImplementedError: if the options cannot be combined.
        RuntimeError: if a unit is busy or already summoned.
    """
    wrappers = Wrapper.fsdp_modules(module)
    if not recurse:
        wrappers = [wrapper for wrapper in wrappers if wrapper is module]
    for wrapper in wrappers:
        wrapper._recover_after_error()
        if wrapper._root_state is not None and wrapper._root_state.is_busy:
            raise UnitIsBusyError(message("summon-while-running", idle=Phase.IDLE))
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
                if wrapper._root_state is not None and wrapper._unit is not None:
                    wrapper._root_state.iteration.summoned.add(wrapper._unit)


def clear_gradients(module: nn.Module, set_to_none: bool) -> None:
    """Clears gradients of all units, including unsharded units whose modules have views instead of parameters."""
    for unit in units_in(module):
        for parameter in unit.layout.local_parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def clip_grad_norm(wrapper: Wrapper, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scales all gradients of the tree so that their total norm is at most ``max_norm``. Every rank must call it.

    Returns:
        The norm before clipping, the same on all ranks.

    Raises:
        RuntimeError: if this is not the root, full parameters are summoned, or there are gradients that were never
            reduced.
    """
    wrapper._only_on_the_root("clip_grad_norm_()")
    layouts = [unit.layout for unit in units_in(wrapper)]
    validation.check_reduced("clip_grad_norm_()", layouts)
    parts = [part for layout in layouts for part in gradient_parts(layout)]
    owned = {parameter for layout in layouts for parameter in layout.local_parameters()}
    for parameter in wrapper.parameters():
        if parameter not in owned:
            gradient = None if parameter.grad is None else local_tensor(parameter.grad)
            parts.append((groups_of(parameter), gradient))
    return clip_gradients(parts, max_norm, norm_type, wrapper.compute_device)


def register_comm_hook(wrapper: Wrapper, state: object, hook: Callable[..., Any]) -> None:
    """Replaces the gradient reduction of all units of the tree by ``hook``.

    Raises:
        AssertionError: if this is not the root, the strategy is hybrid, or there is already a hook.
        RuntimeError: if a forward has already run.
    """
    if wrapper._is_inner:
        raise AssertionError(message("hook-root-only"))
    wrappers = Wrapper.fsdp_modules(wrapper)
    # Raise this error even with a single replica, because the same program would raise it on several nodes.
    if any(inner.sharding_strategy in HYBRID_SHARDING_STRATEGIES for inner in wrappers):
        raise AssertionError(message("hook-hybrid"))
    if any(inner._comm_hook is not None for inner in wrappers):
        raise AssertionError(message("hook-twice"))
    if wrapper._root_state is not None:
        raise RuntimeError(message("hook-too-late"))
    for inner in wrappers:
        inner._comm_hook = hook
        inner._comm_hook_state = state
    for unit in units_in(wrapper):
        unit.plan.hook = functools.partial(hook, state)
