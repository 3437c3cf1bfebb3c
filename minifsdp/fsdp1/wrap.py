"""Cutting a tree of modules into units: by a policy, or by hand with ``wrap``.

By a policy it takes two steps, and data flow one way:

1. `choose` walks over the tree, asks the policy (``policies.py`` says what about) and lists the chosen modules. Nothing
   is changed yet.
2. `apply` puts a wrapper in every place of each of them, inner ones first.

Between the two the cut can be looked at, compared and tested without a process group.

Batch norms compute badly in low precision. Under a `MixedPrecision` the walk therefore *sets apart* the modules of its
``_module_classes_to_ignore``, wherever they are: each becomes a unit without mixed precision, whatever the policy said.
Its neighbours still compute in low precision, so it casts its inputs to its own dtype and its output back.

Worked example, ``size_based_auto_wrap_policy`` with ``min_num_params=80``, bfloat16, and two blocks, each of a
``Linear(8, 8)`` (72 elements) and a ``BatchNorm1d(8)`` (16)::

    without mixed precision     a block has 88 elements left, a unit of 88
    with it                     16 are set apart, 72 are left: too few, the block stays in the outer unit

On two ranks a rank stores 44 + 44 elements after the first cut, and after the second 8 + 8 for the batch norms and 72
in the outer unit. So the order matters: setting apart cannot wait until the policy has spoken about everything.

A module with several places in the tree, say one projection used by two blocks, is asked about and wrapped once, and
the very wrapper is put in all its places: two wrappers would hold the same parameters.

By hand, `enable_wrap` says once what to wrap with, and each `wrap` inside it makes a unit at once, while the model is
being built. The largest layers are then in pieces before the next one is allocated.

*In torch:* ``_recursive_wrap`` and ``_auto_wrap`` ask and wrap in one go. Four things differ. There each place of a
shared module is wrapped again, or forgotten. Tied parameters of a unit are counted again at their other place. Giving a
`MixedPrecision` makes torch ask the policy about the inside of what it has declined to look into; for
``size_based_auto_wrap_policy`` these are the parts of a ``MultiheadAttention``, whose weights are used without calling
them. Here only what is to be set apart is looked for there. And `enable_wrap` may be nested and belongs to one thread
or task, where torch has one switch for the whole process.

Spec: WRAP-03, WRAP-10, WRAP-12, WRAP-13, MP-19, MP-20, MP-21, IGN-10.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from minifsdp.engine.messages import message, warn
from minifsdp.engine.precision import cast_floating, tensors_in
from minifsdp.fsdp1.compiling import is_compiled
from minifsdp.fsdp1.policies import Overrides, question, require_classes


def choose(
    root_module: nn.Module,
    policy: Any,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    set_apart: tuple[type[nn.Module], ...] = (),
) -> dict[nn.Module, Overrides]:
    """The modules that become units, children before parents, each with the arguments that override the outer ones.

    Nothing is changed. Every rank must come to the same answer, so a policy must not depend on the rank.

    Args:
        root_module: the outermost module; it is not among the chosen.
        policy: a function (WRAP-02) or a policy object.
        ignored_modules: never chosen, nor is what is inside them; their parameters count as taken.
        ignored_params: count as taken (IGN-10).
        set_apart: classes that become units without mixed precision, whatever the policy says (MP-19).

    Raises:
        TypeError: ``policy`` is not a policy.
    """
    ignored = {inner for module in ignored_modules for inner in module.modules()}
    taken = {*ignored_params, *(p for module in ignored for p in module.parameters())}
    decided = set(ignored)
    chosen: dict[nn.Module, Overrides] = {}
    asked = question(policy, root_module, ignored)

    def ask(module: nn.Module, recurse: bool) -> Overrides | None:
        return asked(module, recurse, sum(p.numel() for p in module.parameters() if p not in taken))

    def visit(module: nn.Module, may_ask: bool) -> None:
        if module in decided:
            return
        if may_ask:
            decided.add(module)
        descend = may_ask and ask(module, recurse=True) is not None
        if descend or set_apart:
            for child in module.children():
                visit(child, descend)
        if module is root_module:
            return
        overrides = ask(module, recurse=False) if descend else None
        if isinstance(module, set_apart):
            overrides = {**(overrides or {}), "mixed_precision": None}
        if overrides is not None:
            chosen[module] = overrides
            taken.update(module.parameters())
            # A part of this module may have a second place elsewhere in the tree. Its parameters are taken now.
            decided.update(module.modules())

    visit(root_module, may_ask=True)
    return chosen


def apply(
    root_module: nn.Module,
    chosen: Mapping[nn.Module, Overrides],
    wrapper_cls: Callable[..., nn.Module],
    kwargs: Mapping[str, Any],
) -> None:
    """Puts ``wrapper_cls(module, **kwargs)``, with the module's overrides, in every place of each chosen module.

    Args:
        root_module: the outermost module; it is changed in place and not wrapped itself.
        chosen: from `choose`; wrapped in its order, so a wrapper finds the inner ones already there.
        wrapper_cls: makes a wrapper around a module. It may be a collective: then every rank must call `apply`.
        kwargs: the outer unit's arguments, as an inner unit shall get them (WRAP-14).
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in chosen}
    for parent in root_module.modules():
        # Not named_children(): it names a module that has two names in one parent only once.
        for name, child in parent._modules.items():
            if child in places:
                places[child].append((parent, name))
    for module, overrides in chosen.items():
        wrapper = wrapper_cls(module, **{**kwargs, **overrides})
        for parent, name in places[module]:
            setattr(parent, name, wrapper)


def refuse_wrapped(root_module: nn.Module, wrapper_cls: type[nn.Module]) -> None:
    """An automatic cut needs an uncut tree.

    Raises:
        ValueError: there is an instance of ``wrapper_cls`` in the tree already; names the first one (WRAP-13).
    """
    for path, module in root_module.named_modules():
        if isinstance(module, wrapper_cls):
            # The wording up to "in" is what programs written for torch's FSDP look for.
            raise ValueError(
                message("already-wrapped", module=path or "the module itself", type=type(root_module).__name__)
            )


def refuse_ties(
    root_module: nn.Module, chosen: Mapping[nn.Module, Overrides], ignored_params: set[nn.Parameter]
) -> None:
    """A parameter belongs to one unit; two copies of it would drift apart.

    Raises:
        ValueError: one is tied between two of the units to be; names both places (ORIG-16).
    """
    first_seen: dict[nn.Parameter, tuple[nn.Module, str]] = {}

    def visit(module: nn.Module, path: str, unit: nn.Module) -> None:
        unit = module if module in chosen else unit
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored_params:
                continue
            full_name = f"{path}{name}"
            owner, other = first_seen.setdefault(parameter, (unit, full_name))
            if owner is not unit:
                raise ValueError(message("policy-splits-tie", other=other, full_name=full_name))
        for name, child in module.named_children():
            visit(child, f"{path}{name}.", unit)

    visit(root_module, "", root_module)


def refuse_compiled(root_module: nn.Module, chosen: Mapping[nn.Module, Overrides]) -> None:
    """A wrapper inside of a compiled module is never called.

    Raises:
        ValueError: one of the chosen was given to ``torch.compile``; names it.
    """
    for path, module in root_module.named_modules():
        inside = next((child for child in module.children() if child in chosen), None)
        if inside is not None and is_compiled(module):
            raise ValueError(message("compiled-before", type=type(inside).__name__, path=path))


class _OwnDtype:
    """Lets one module compute in its own dtype between neighbours that compute in a lower one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.outside: torch.dtype | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtypes = {t.dtype: None for t in tensors_in((args, kwargs)) if t.is_floating_point()}
        # An output goes back only if something came in that way: what the module itself turns into another dtype stays.
        self.outside = next((dtype for dtype in dtypes if dtype is not self.dtype), None)
        return cast_floating(self.dtype, args), cast_floating(self.dtype, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self.outside is None else cast_floating(self.outside, output)


def _compute_in_own_dtype(module: nn.Module) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    hooks = _OwnDtype(next((t.dtype for t in tensors if t.is_floating_point()), torch.float32))
    module.register_forward_pre_hook(hooks.before, with_kwargs=True)
    module.register_forward_hook(hooks.after)


def auto_wrap(
    root_module: nn.Module,
    policy: Any,
    wrapper_cls: type[nn.Module],
    kwargs: Mapping[str, Any],
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
) -> None:
    """Both steps: cuts ``root_module``, in place, into what ``policy`` says. Making units may be a collective.

    Args:
        root_module: the outermost module; the caller makes the unit around it afterwards.
        policy: as in `choose`.
        wrapper_cls: the wrapper's class.
        kwargs: arguments for inner units. A ``mixed_precision`` among them that is not ``None`` sets the modules of its
            ``_module_classes_to_ignore`` apart, and one warning lists their classes.
        ignored_modules: as in `choose`.
        ignored_params: as in `choose`.

    Raises:
        TypeError: ``policy`` is not a policy.
        ValueError: the tree holds wrappers already, ties two units, or has a compiled module around a unit.
    """
    refuse_wrapped(root_module, wrapper_cls)
    mixed_precision = kwargs.get("mixed_precision")
    ignored_classes = () if mixed_precision is None else mixed_precision._module_classes_to_ignore
    set_apart = require_classes(ignored_classes, "_module_classes_to_ignore")
    chosen = choose(root_module, policy, ignored_modules, ignored_params, set_apart)
    refuse_ties(root_module, chosen, set(ignored_params))
    refuse_compiled(root_module, chosen)
    apart = [module for module in chosen if isinstance(module, set_apart)]
    if apart:
        names = ", ".join(sorted({type(module).__name__ for module in apart}))
        warn(message("kept-full-precision", names=names))
    for module in apart:
        _compute_in_own_dtype(module)
    apply(root_module, chosen, wrapper_cls, kwargs)


# ---- by hand --------------------------------------------------------------------------------------------------------

_DEFAULTS: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar("defaults", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Inside this context `wrap` makes units; at its end what was before counts again (WRAP-12).

    The context belongs to the running thread or task. An inner context replaces an outer one, it adds nothing to it.

    Args:
        wrapper_cls: what to wrap with, e.g. ``FullyShardedDataParallel``.
        **wrapper_kwargs: its arguments for every module wrapped inside.
    """
    token = _DEFAULTS.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _DEFAULTS.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` as a unit inside `enable_wrap`, and untouched outside, so that a model can be written for both.

    Args:
        module: what to wrap.
        **wrap_overrides: arguments that win over those of the context.
    """
    defaults = _DEFAULTS.get()
    if defaults is None:
        return module
    wrapper_cls, kwargs = defaults
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})
