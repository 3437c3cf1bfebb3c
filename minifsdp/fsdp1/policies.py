"""Who becomes a unit: auto-wrap policies.

How a model is cut into units decides almost everything about speed and memory. One unit for all means that the whole
model is gathered at once; a unit for every layer means a hundred small messages. A *policy* makes the cut: a yes or no
for each module. The cutting itself is in ``wrap.py``.

A policy that is a function is asked up to twice about a module. Before the descent, with ``recurse=True``: shall I look
at what is inside? After it, with ``recurse=False``: shall this module be a unit? Both times it is told
``nonwrapped_numel``, the elements inside that are not taken yet, neither by a unit nor a list of ignored things.
Children are decided before their parent, so a parent is asked about what its children have left over.

Worked example, ``functools.partial(size_based_auto_wrap_policy, min_num_params=40)``. Each ``Linear(5, 5)`` has 30
elements, and the last two sit in a ``Sequential`` of their own::

    module   recurse   nonwrapped_numel   answer
    (all)    True      120                yes
    0        True      30                 no        so it is not asked about again
    1        True      30                 no
    2        True      60                 yes
    2.0      True      30                 no
    2.1      True      30                 no
    2        False     60                 yes       a unit
    (all)                                 not asked: the outermost module is always a unit, here of the other 60

On two ranks each stores 30 + 30 elements. Without the policy a rank holds 120 elements during forward; with it 60 for
the outer unit and, while module 2 computes, 60 more. The price is a second all-gather. For a model of many blocks the
balance is better: all but one block stay in pieces.

A policy that is an object sees the whole tree at once and answers with the chosen modules. It can say more than yes: a
`CustomPolicy` may give a unit other arguments than its neighbours have.

*In torch:* ``torch/distributed/fsdp/wrap.py``. Its policy objects work here too, because only their one method is asked
for. Two things differ. The constructor does not ask a policy object about the outermost module, on which it has no say;
a program that asks the object itself is told about all modules. And a function that cannot be called as it is meant to
be is refused before anything is changed, with the ``functools.partial`` that is missing.

Spec: WRAP-02 to WRAP-09, WRAP-16, WRAP-18, LEGACY-02, LEGACY-03, NEW-02, NEW-03.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

from torch import nn

from minifsdp.engine.messages import message, warn_renamed

P = ParamSpec("P")
Overrides = dict[str, Any]
"""Constructor arguments of one unit that differ from those of the outermost one."""
Question = Callable[[nn.Module, bool, int], Overrides | None]
"""A policy of any kind as (module, recurse, nonwrapped_numel) -> ``None`` for no, overrides (often ``{}``) for yes."""


# ---- policies that are functions ------------------------------------------------------------------------------------


def _require_call(policy: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """The ``TypeError`` that Python would raise for this call, with the remedy in it."""
    try:
        inspect.signature(policy).bind(*args, **kwargs)
    except ValueError:
        return  # Some builtins have no signature; calling them is the only way to find out.
    except TypeError as error:
        name = getattr(policy, "__name__", repr(policy))
        own = [p for p in inspect.signature(policy).parameters if p not in ("module", "recurse", "nonwrapped_numel")]
        raise TypeError(message("policy-call", name=name, error=error, own=own[0] if own else "...")) from None


def _explains_binding(policy: Callable[P, bool]) -> Callable[P, bool]:
    """Calling a policy oneself instead of binding it is the most common mistake with them: say so."""

    @functools.wraps(policy)
    def checked(*args: P.args, **kwargs: P.kwargs) -> bool:
        _require_call(policy, *args, **kwargs)
        return policy(*args, **kwargs)

    return checked


def require_classes(classes: Any, name: str) -> tuple[type[nn.Module], ...]:
    """``classes`` as a tuple. Raises ``TypeError``, which calls them ``name``, if they are something else."""
    if isinstance(classes, Iterable) and not isinstance(classes, type):
        found = tuple(classes)
        if all(isinstance(item, type) for item in found):
            return found
    raise TypeError(message("policy-classes", name=name, classes=classes))


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Every module becomes a unit. Mostly of use in tests (NEW-03)."""
    return True


@_explains_binding
def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """A module becomes a unit where ``lambda_fn(module)`` is true; bind ``lambda_fn`` first (NEW-03)."""
    return True if recurse else lambda_fn(module)


@_explains_binding
def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Instances of the given classes become units; bind ``transformer_layer_cls`` first (WRAP-08).

    Embeddings that encoder and decoder share stay in the outer unit, where both can use them.

    Raises:
        TypeError: called or passed without ``transformer_layer_cls`` being bound (WRAP-09).
    """
    return recurse or isinstance(module, require_classes(transformer_layer_cls, "transformer_layer_cls"))


@_explains_binding
def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """A subtree becomes a unit as soon as it has ``min_num_params`` elements that are not taken (WRAP-06, WRAP-07).

    Args:
        module: the module in question.
        recurse: whether the question is to go on inside, or to wrap.
        nonwrapped_numel: elements inside that are not taken yet.
        min_num_params: elements (not parameters, in spite of its name) from which on a unit is worth its message.
        force_leaf_modules: classes whose inside stays whole; ``None`` means the attribute ``FORCE_LEAF_MODULES``.
            ``MultiheadAttention`` is one: it uses the weights of its parts without calling their forward.
        exclude_wrap_modules: classes that are never units; ``None`` means ``EXCLUDE_WRAP_MODULES``. Lists and dicts of
            modules have no forward, so nothing would gather a unit made of one.
    """
    if force_leaf_modules is None:
        force_leaf_modules = size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
    if exclude_wrap_modules is None:
        exclude_wrap_modules = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    declined = force_leaf_modules if recurse else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(declined))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def default_auto_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """The name that ``size_based_auto_wrap_policy`` had in torch 1.11; warns (LEGACY-02)."""
    warn_renamed("default_auto_wrap_policy", "size_based_auto_wrap_policy")
    return size_based_auto_wrap_policy(*args, **kwargs)


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    # Private in torch, and imported from there by many training scripts all the same.
    return any(p(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for p in policies)


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: set[type[nn.Module]]
) -> bool:
    # `ModuleWrapPolicy` as a function; private in torch and imported from there, together with `_or_policy`.
    return recurse or isinstance(module, require_classes(module_classes, "module_classes"))


# ---- policies that are objects --------------------------------------------------------------------------------------


class _Policy(ABC):
    """A policy that sees the whole tree at once; torch's own policy objects fit it too."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """The chosen modules, each with ``root_kwargs`` changed to what its own unit shall get.

        Programs that shard by themselves ask this, and the outermost module is theirs to shard as well (WRAP-18).
        """


class ModuleWrapPolicy(_Policy):
    """Every instance of the given classes becomes a unit, instances of their subclasses too (WRAP-05).

    Args:
        module_classes: the classes, for instance ``{Block}``.

    Raises:
        TypeError: it is not an iterable of classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = frozenset(require_classes(module_classes, "module_classes"))

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        asked = (module for module in root_module.modules() if module not in ignored_modules)
        return {module: dict(root_kwargs) for module in asked if self(module, recurse=False)}

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """The same as a function, to be combined with other functions."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        names = ", ".join(sorted(cls.__name__ for cls in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy(_Policy):
    """The user's function decides, and may give a unit other constructor arguments than the outer one (NEW-02).

    Args:
        lambda_fn: called with each module that is not ignored; returns ``True``, ``False``, or a dict of arguments to
            override. An empty dict means ``False``.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        chosen: dict[nn.Module, dict[str, Any]] = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(message("policy-answer", type=type(module).__name__, answer=answer))
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen


# ---- asking a policy ------------------------------------------------------------------------------------------------


def require_policy(policy: Any) -> None:
    """Whether ``policy`` can be asked at all. To be called before the first collective.

    Raises:
        TypeError: it is neither callable nor a policy object (WRAP-16), or some of its parameters must be bound first
            (WRAP-09).
    """
    if isinstance(policy, type) or not (callable(policy) or hasattr(policy, "_run_policy")):
        raise TypeError(message("policy-type", policy=policy))
    if not hasattr(policy, "_run_policy"):
        _require_call(policy, module=None, recurse=True, **{_name_of_numel(policy): 0})


def _name_of_numel(policy: Callable[..., object]) -> str:
    try:
        names = inspect.signature(policy).parameters
    except ValueError:
        return "nonwrapped_numel"
    return "unwrapped_params" if "unwrapped_params" in names else "nonwrapped_numel"


def _under_new_name(policy: Callable[..., object]) -> Callable[..., object]:
    bound = policy if isinstance(policy, functools.partial) else functools.partial(policy)
    if bound.func is not default_auto_wrap_policy:
        return policy
    return functools.partial(size_based_auto_wrap_policy, *bound.args, **bound.keywords)


def question(policy: Any, root_module: nn.Module, ignored_modules: set[nn.Module]) -> Question:
    """A policy of any kind in the one form that the cutting knows.

    Old spellings warn here, once for a whole tree and not once for each of its modules (LEGACY-02, LEGACY-03).

    Args:
        policy: a function (WRAP-02) or a policy object.
        root_module: the tree that it will be asked about; a policy object is asked now.
        ignored_modules: what is out of the question, descendants included.

    Raises:
        TypeError: see `require_policy`.
    """
    require_policy(policy)
    if hasattr(policy, "_run_policy"):
        # The outermost module is out of the question: it becomes a unit whatever the policy says (WRAP-10).
        picked: dict[nn.Module, Overrides] = policy._run_policy(root_module, {root_module, *ignored_modules}, {})
        return lambda module, recurse, numel: {} if recurse else picked.get(module)
    function = _under_new_name(policy)
    if function is not policy:
        warn_renamed("default_auto_wrap_policy", "size_based_auto_wrap_policy")
    name = _name_of_numel(function)
    if name == "unwrapped_params":
        warn_renamed("the parameter unwrapped_params of a wrapping policy", "nonwrapped_numel")
    return lambda module, recurse, numel: {} if function(module=module, recurse=recurse, **{name: numel}) else None
