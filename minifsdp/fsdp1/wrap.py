"""Splitting a module tree into units: with a policy, or manually with ``wrap``.

With a policy, there are two steps:

1. `choose` only reads the tree. It calls the policy (see ``policies.py``) and returns the chosen modules.
2. `apply` replaces each chosen module with a wrapper at every place in the tree, inner modules first.

Between the two steps, the choice can be inspected, compared and tested without a process group.

Batch norms are inaccurate in low precision. With a `MixedPrecision`, the walk therefore *sets apart* all modules of its
``_module_classes_to_ignore``: each becomes a unit without mixed precision, independent of the policy. The modules
around such a unit still compute in low precision, so it casts its inputs to its own dtype and its output back.

Worked example, ``size_based_auto_wrap_policy`` with ``min_num_params=80``, bfloat16, and two blocks, each of a
``Linear(8, 8)`` (72 elements) and a ``BatchNorm1d(8)`` (16)::

    without mixed precision     a block has 88 elements left, a unit of 88
    with it                     16 are set apart, 72 are left: too few, the block stays in the outer unit

On two ranks, each rank stores 44 + 44 elements in the first case. In the second case it stores 8 + 8 for the batch
norms and 72 in the outer unit. So `choose` must set modules apart before it calls the policy for their parents.

A module can have several places in the tree, for example one projection that two blocks use. `choose` calls the policy
once for such a module, and `apply` puts one wrapper in all its places, because two wrappers would hold the same
parameters.

For manual wrapping, `enable_wrap` sets the wrapper class and its arguments, and each `wrap` inside it creates a unit
immediately, while the model is being built. Each large layer is then sharded before the next layer is allocated.

*In torch:* ``_recursive_wrap`` and ``_auto_wrap`` call the policy and wrap in one step. There are four differences.
Torch wraps a shared module again at each place, or does not wrap it there. It counts tied parameters of a unit twice.
With a `MixedPrecision`, torch also calls the policy for the children of modules that the policy excludes with
``recurse=True``. For ``size_based_auto_wrap_policy`` these are the children of a ``MultiheadAttention``, whose forward
is never called. minifsdp only searches these children for modules to set apart. Finally, `enable_wrap` can be nested
and applies to one thread or task, but torch has one setting for the whole process.

Spec: WRAP-03, WRAP-10, WRAP-12, WRAP-13, MP-19, MP-20, MP-21, IGN-10.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from minifsdp.cases.compiled_models import refuse_compiled
from minifsdp.cases.modules_in_own_dtype import compute_in_own_dtype
from minifsdp.engine.messages import message, warn
from minifsdp.fsdp1.policies import Chosen, Overrides, decision_of, require_classes


def choose(
    root_module: nn.Module,
    policy: Any,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    set_apart: tuple[type[nn.Module], ...] = (),
) -> Chosen:
    """Returns the modules that become units, children before parents, each with overrides of the outer arguments.

    It does not change the tree. The result must be the same on every rank, so a policy must not depend on the rank.

    Args:
        root_module: the outermost module; it is never in the result.
        policy: a function (WRAP-02) or a policy object.
        ignored_modules: modules that, with their descendants, are never chosen. Their parameters are not counted.
        ignored_params: parameters that are not counted (IGN-10).
        set_apart: classes whose instances become units without mixed precision, independent of the policy (MP-19).

    Raises:
        TypeError: if ``policy`` is not a policy.
    """
    ignored = {inner for module in ignored_modules for inner in module.modules()}
    # Parameters that are not counted.
    taken = {*ignored_params, *(p for module in ignored for p in module.parameters())}
    decision = decision_of(policy, root_module, ignored)

    def decide(module: nn.Module, recurse: bool) -> Overrides | None:
        free = (p.numel() for p in module.parameters() if p not in taken)
        return decision(module, recurse, sum(free))

    chosen: Chosen = {}
    # Modules that are not visited again.
    decided = set(ignored)
    # A list, because a recursive function inside this one would be a reference cycle. It would keep the unsharded
    # parameters in memory until Python's garbage collector runs (COST-22). Each module is in it before its children,
    # and once more after them, each time with whether the policy is called for it.
    left = [(root_module, True, False)]
    while left:
        module, calls_policy, is_after = left.pop()
        if is_after:
            overrides = decide(module, recurse=False) if calls_policy else None
            if isinstance(module, set_apart):
                overrides = {**(overrides or {}), "mixed_precision": None}
            if overrides is not None:
                chosen[module] = overrides
                taken.update(module.parameters())
                # A descendant can have another place in the tree. This unit has its parameters, so do not visit it
                # again.
                decided.update(module.modules())
        elif module not in decided:
            if calls_policy:
                decided.add(module)
                calls_policy = decide(module, recurse=True) is not None
            if module is not root_module:
                left.append((module, calls_policy, True))
            if calls_policy or set_apart:
                children = [(child, calls_policy, False) for child in module.children()]
                left += reversed(children)
    return chosen


def apply(
    root_module: nn.Module,
    chosen: Chosen,
    wrapper_cls: Callable[..., nn.Module],
    kwargs: Mapping[str, Any],
) -> None:
    """Replaces each chosen module, at every place, with ``wrapper_cls(module, **kwargs)`` with the module's overrides.

    Args:
        root_module: the outermost module; it is changed in place and not wrapped itself.
        chosen: the result of `choose`. Modules are wrapped in its order, so inner wrappers are created first.
        wrapper_cls: creates a wrapper around a module. If it is a collective, every rank must call `apply`.
        kwargs: the arguments for inner units, derived from those of the outer unit (WRAP-14).
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {
        module: [] for module in chosen
    }
    for parent in root_module.modules():
        # named_children() would return a module with two names in one parent only once.
        for name, child in parent._modules.items():
            if child in places:
                places[child].append((parent, name))
    for module, overrides in chosen.items():
        wrapper = wrapper_cls(module, **{**kwargs, **overrides})
        for parent, name in places[module]:
            setattr(parent, name, wrapper)


def refuse_wrapped(root_module: nn.Module, wrapper_cls: type[nn.Module]) -> None:
    """Checks that an auto-wrap policy gets a tree without wrappers.

    Raises:
        ValueError: if the tree contains an instance of ``wrapper_cls``. The message has its name (WRAP-13).
    """
    for path, module in root_module.named_modules():
        if isinstance(module, wrapper_cls):
            # Programs for torch's FSDP match the wording up to "in".
            raise ValueError(
                message(
                    "already-wrapped",
                    module=path or "the module itself",
                    type=type(root_module).__name__,
                )
            )


def refuse_ties(
    root_module: nn.Module, chosen: Chosen, ignored_params: set[nn.Parameter]
) -> None:
    """Checks that each parameter belongs to only one unit, because two copies would diverge.

    Raises:
        ValueError: if a parameter is tied between two future units. The message has both names (ORIG-16).
    """
    first_seen: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    # By path, the module that becomes the unit of the module at this path.
    units: dict[str, nn.Module] = {}
    for path, module in root_module.named_modules(remove_duplicate=False):
        units[path] = unit = (
            module
            if module in chosen
            else units.get(path.rpartition(".")[0], root_module)
        )
        for full_name, parameter in module.named_parameters(
            path, recurse=False, remove_duplicate=False
        ):
            owner, other = first_seen.setdefault(parameter, (unit, full_name))
            if owner is not unit and parameter not in ignored_params:
                raise ValueError(
                    message("policy-splits-tie", other=other, full_name=full_name)
                )


def auto_wrap(
    root_module: nn.Module,
    policy: Any,
    wrapper_cls: type[nn.Module],
    kwargs: Mapping[str, Any],
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
) -> None:
    """Runs both steps: wraps the modules in ``root_module`` that ``policy`` chooses. This can be a collective.

    Args:
        root_module: the outermost module; the caller creates the unit around it afterwards.
        policy: as in `choose`.
        wrapper_cls: the wrapper's class.
        kwargs: arguments for inner units. If they contain a ``mixed_precision``, the modules of its
            ``_module_classes_to_ignore`` are set apart, and one warning lists their classes.
        ignored_modules: as in `choose`.
        ignored_params: as in `choose`.

    Raises:
        TypeError: if ``policy`` is not a policy.
        ValueError: if the tree already has wrappers, ties two units, or has a unit inside a compiled module.
    """
    refuse_wrapped(root_module, wrapper_cls)
    set_apart = require_classes(
        getattr(kwargs.get("mixed_precision"), "_module_classes_to_ignore", ()),
        "_module_classes_to_ignore",
    )
    chosen = choose(root_module, policy, ignored_modules, ignored_params, set_apart)
    refuse_ties(root_module, chosen, set(ignored_params))
    refuse_compiled(root_module, chosen)
    apart = [module for module in chosen if isinstance(module, set_apart)]
    if apart:
        names = ", ".join(sorted({type(module).__name__ for module in apart}))
        warn(message("kept-full-precision", names=names))
    for module in apart:
        compute_in_own_dtype(module)
    apply(root_module, chosen, wrapper_cls, kwargs)


# ---- manually -------------------------------------------------------------------------------------------------------

_DEFAULTS: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = (
    ContextVar("defaults", default=None)
)


@contextmanager
def enable_wrap(
    *, wrapper_cls: Any, **wrapper_kwargs: Any
) -> Generator[None, None, None]:
    """Context manager in which `wrap` creates units. On exit, it restores the previous setting (WRAP-12).

    The context applies to the current thread or task. An inner context replaces the outer context and its arguments.

    Args:
        wrapper_cls: the wrapper class, for example ``FullyShardedDataParallel``.
        **wrapper_kwargs: its arguments for every module wrapped in the context.
    """
    token = _DEFAULTS.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps ``module`` inside `enable_wrap` and returns it unchanged outside, so model code works in both cases.

    Args:
        module: the module to wrap.
        **wrap_overrides: arguments that override those of the context.
    """
    defaults = _DEFAULTS.get()
    if defaults is None:
        return module
    wrapper_cls, kwargs = defaults
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})
