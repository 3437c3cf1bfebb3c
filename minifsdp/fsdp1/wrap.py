"""Splitting a module tree into units: with an auto-wrap policy, or manually with ``wrap``.

The choice of units determines most of the speed and memory of a model. With one unit, the whole model is all-gathered
at once. With a unit for every layer, there are a hundred small all-gathers. A *policy* decides for each module whether
it becomes a unit.

A policy function is called up to twice for each module. The call before its children, with ``recurse=True``, returns
whether to visit the children. The call after them, with ``recurse=False``, returns whether the module becomes a unit.
Both calls get ``nonwrapped_numel``, the number of elements in the module that belong to no unit and are not ignored.
The policy decides on children before their parent, so the parent's count excludes parameters of its wrapped children.

Worked example, ``functools.partial(size_based_auto_wrap_policy, min_num_params=40)``. Each ``Linear(5, 5)`` has 30
elements, and the last two are in a nested ``Sequential``::

    module   recurse   nonwrapped_numel   result
    (all)    True      120                yes
    0        True      30                 no        so there is no second call
    1        True      30                 no
    2        True      60                 yes
    2.0      True      30                 no
    2.1      True      30                 no
    2        False     60                 yes       a unit
    (all)                                 no call: the outermost module is always a unit, here with the other 60

On two ranks, each rank stores 30 + 30 elements. Without the policy, a rank holds 120 elements during forward. With it,
a rank holds 60 for the outer unit and 60 more while module 2 computes. The cost is a second all-gather. A model with
many blocks saves more, because all blocks but one stay sharded.

A policy object gets the whole module tree in one call and returns the chosen modules. It can also return arguments: a
`CustomPolicy` can give each unit different constructor arguments.

With a policy, there are two steps:

1. `choose` only reads the tree. It calls the policy and returns the chosen modules.
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

*In torch:* ``torch/distributed/fsdp/wrap.py``. Its policy objects work here too, because minifsdp only calls their
``_run_policy``. There are two differences. The constructor excludes the outermost module when it calls a policy object,
because this module is always a unit. A direct call of the object includes this module. A function with a wrong
signature raises an error before the model is changed, and the message shows the missing ``functools.partial``.

``_recursive_wrap`` and ``_auto_wrap`` of torch call the policy and wrap in one step. There are four differences.
Torch wraps a shared module again at each place, or does not wrap it there. It counts tied parameters of a unit twice.
With a `MixedPrecision`, torch also calls the policy for the children of modules that the policy excludes with
``recurse=True``. For ``size_based_auto_wrap_policy`` these are the children of a ``MultiheadAttention``, whose forward
is never called. minifsdp only searches these children for modules to set apart. Finally, `enable_wrap` can be nested
and applies to one thread or task, but torch has one setting for the whole process.

Spec: WRAP-02 to WRAP-10, WRAP-12, WRAP-13, WRAP-16, WRAP-18, MP-19, MP-20, MP-21, IGN-10, LEGACY-02, LEGACY-03, NEW-02,
NEW-03.
"""

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from minifsdp.cases.compiled_models import refuse_compiled
from minifsdp.cases.modules_in_own_dtype import compute_in_own_dtype
from minifsdp.cases.unbound_policies import explains_binding, require_call
from minifsdp.checks.arguments import warn_renamed
from minifsdp.engine.messages import message, warn

# Constructor arguments of one unit that differ from those of the outermost one.
Overrides = dict[str, Any]
# The modules that become units, each with constructor arguments.
Chosen = dict[nn.Module, Overrides]


# ---- policies that are functions ------------------------------------------------------------------------------------


def require_classes(classes: Any, name: str) -> tuple[type[nn.Module], ...]:
    """Returns ``classes`` as a tuple. Raises ``TypeError`` about the argument ``name`` if they are not classes."""
    if isinstance(classes, Iterable) and not isinstance(classes, type):
        found = tuple(classes)
        if all(isinstance(item, type) for item in found):
            return found
    raise TypeError(message("policy-classes", name=name, classes=classes))


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Makes every module a unit. Mostly useful in tests (NEW-03)."""
    return True


@explains_binding
def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Makes a module a unit if ``lambda_fn(module)`` is true; bind ``lambda_fn`` first (NEW-03)."""
    return True if recurse else lambda_fn(module)


@explains_binding
def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Makes instances of the given classes units; bind ``transformer_layer_cls`` first (WRAP-08).

    Embeddings that the encoder and the decoder share stay in the outer unit, where both can use them.

    Raises:
        TypeError: if it is called or passed without binding ``transformer_layer_cls`` (WRAP-09).
    """
    return recurse or isinstance(
        module, require_classes(transformer_layer_cls, "transformer_layer_cls")
    )


@explains_binding
def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Makes a subtree a unit once it has ``min_num_params`` elements outside of other units (WRAP-06, WRAP-07).

    Args:
        module: the module to decide on.
        recurse: ``True`` to decide whether to visit the children, ``False`` to decide whether to wrap the module.
        nonwrapped_numel: number of elements in the module that belong to no unit and are not ignored.
        min_num_params: minimum number of elements of a unit (elements, not parameters, despite the name).
        force_leaf_modules: classes whose children are not visited; ``None`` means the attribute ``FORCE_LEAF_MODULES``.
            By default, ``MultiheadAttention``, which uses the weights of its children without calling their forward.
        exclude_wrap_modules: classes that never become units; ``None`` means ``EXCLUDE_WRAP_MODULES``. ``ModuleList``
            and ``ModuleDict`` have no forward, so their unit would never be all-gathered.
    """
    declined = force_leaf_modules if recurse else exclude_wrap_modules
    if declined is None:
        own: Any = size_based_auto_wrap_policy
        declined = own.FORCE_LEAF_MODULES if recurse else own.EXCLUDE_WRAP_MODULES
    return nonwrapped_numel >= min_num_params and not isinstance(
        module, tuple(declined)
    )


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def default_auto_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """The torch 1.11 name of ``size_based_auto_wrap_policy``. Issues a deprecation warning (LEGACY-02)."""
    warn_renamed("default_auto_wrap_policy", "size_based_auto_wrap_policy")
    return size_based_auto_wrap_policy(*args, **kwargs)


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    # This function is private in torch, but many training scripts import it.
    return any(
        p(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for p in policies
    )


def _module_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    module_classes: set[type[nn.Module]],
) -> bool:
    # `ModuleWrapPolicy` as a function. Like `_or_policy`, it is private in torch, but scripts import it.
    return recurse or isinstance(
        module, require_classes(module_classes, "module_classes")
    )


# ---- policies that are objects --------------------------------------------------------------------------------------


class _Policy(torch_wrap._Policy):
    """Base class of policies that get the whole module tree in one call.

    A policy defines ``_run_policy(root_module, ignored_modules, root_kwargs)``. It returns the chosen modules, each
    with the arguments of its unit: ``root_kwargs`` plus overrides. Programs that wrap modules themselves call it, so
    the result can include the outermost module (WRAP-18). ``apply_activation_checkpointing`` checks for torch's class.
    """


class ModuleWrapPolicy(_Policy):
    """Makes every instance of the given classes and their subclasses a unit (WRAP-05).

    Args:
        module_classes: the classes, for example ``{Block}``.

    Raises:
        TypeError: if ``module_classes`` is not an iterable of classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = frozenset(
            require_classes(module_classes, "module_classes")
        )

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: Overrides,
    ) -> Chosen:
        policy = CustomPolicy(functools.partial(self, recurse=False))
        return policy._run_policy(root_module, ignored_modules, root_kwargs)

    def __call__(
        self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any
    ) -> bool:
        """Makes the same decision as a policy function, so that users can combine it with other functions."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        names = ", ".join(sorted(cls.__name__ for cls in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy(_Policy):
    """Calls the user's function for each module. It can override constructor arguments of a unit (NEW-02).

    Args:
        lambda_fn: called with each module that is not ignored. Returns ``True``, ``False``, or a dict of constructor
            arguments to override. An empty dict means ``False``.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: Overrides,
    ) -> Chosen:
        chosen: Chosen = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    message("policy-answer", type=type(module).__name__, answer=answer)
                )
            if answer:
                chosen[module] = {
                    **root_kwargs,
                    **(answer if isinstance(answer, dict) else {}),
                }
        return chosen


# ---- calling a policy -----------------------------------------------------------------------------------------------


def require_policy(policy: Any) -> None:
    """Checks that ``policy`` is a valid policy. Call it before the first collective.

    Raises:
        TypeError: if it is neither callable nor a policy object (WRAP-16), or if some of its parameters must be bound
            first (WRAP-09).
    """
    if isinstance(policy, type) or not (
        callable(policy) or hasattr(policy, "_run_policy")
    ):
        raise TypeError(message("policy-type", policy=policy))
    if not hasattr(policy, "_run_policy"):
        require_call(policy, module=None, recurse=True, **{_name_of_numel(policy): 0})


def _name_of_numel(policy: Callable[..., object]) -> str:
    try:
        names = inspect.signature(policy).parameters
    except ValueError:
        return "nonwrapped_numel"
    return "unwrapped_params" if "unwrapped_params" in names else "nonwrapped_numel"


def decision_of(
    policy: Any, root_module: nn.Module, ignored_modules: set[nn.Module]
) -> Callable[[nn.Module, bool, int], Overrides | None]:
    """Converts a policy of any kind to a function of (module, recurse, nonwrapped_numel).

    The function returns ``None`` for no, and overrides, often ``{}``, for yes.

    Deprecated names cause one warning here for the whole tree, instead of one for each module (LEGACY-02, LEGACY-03).

    Args:
        policy: a function (WRAP-02) or a policy object.
        root_module: the root of the module tree. A policy object is called immediately.
        ignored_modules: modules that cannot become units, including their descendants.

    Raises:
        TypeError: see `require_policy`.
    """
    require_policy(policy)
    if hasattr(policy, "_run_policy"):
        # Exclude the outermost module: it always becomes a unit, independent of the policy (WRAP-10).
        chosen: Chosen = policy._run_policy(
            root_module, {root_module, *ignored_modules}, {}
        )
        return lambda module, recurse, numel: {} if recurse else chosen.get(module)
    bound = functools.partial(policy)
    if bound.func is default_auto_wrap_policy:
        warn_renamed("default_auto_wrap_policy", "size_based_auto_wrap_policy")
        bound = functools.partial(
            size_based_auto_wrap_policy, *bound.args, **bound.keywords
        )
    name = _name_of_numel(bound)
    if name == "unwrapped_params":
        warn_renamed(
            "the parameter unwrapped_params of a wrapping policy", "nonwrapped_numel"
        )
    return lambda module, recurse, numel: (
        {} if bound(module=module, recurse=recurse, **{name: numel}) else None
    )


# ---- with a policy ---------------------------------------------------------------------------------------------------


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
    # and again after them, each time with whether the policy is called for it.
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
