"""Keys of state dicts: the names in the plain module, without the names that wrappers add.

A wrapper adds its own name to the path of all modules inside it, and so does an activation checkpoint. A state dict
must contain neither, so that a model with other wrappers, or without any, can load it. Worked example, the weight of a
block that is checkpointed and wrapped::

    path in the tree    0._fsdp_wrapped_module._checkpoint_wrapped_module.weight
    key                 0.weight

Names are computed on every call and not stored at construction. An activation checkpoint may have been added since, and
a module that is in the tree twice is saved twice.

*In torch:* ``clean_tensor_name``, called wherever a name is used.

Spec: NAMES-10, SD-FULL-01, OSD-03, SAVE-03.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from torch import nn

from minifsdp.fsdp1.build import FlatUnit
from minifsdp.fsdp1.wrapper import PREFIX

CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


def plain_path(path: str) -> str:
    """A path without the names that wrappers and activation checkpoints add."""
    return path.replace(CHECKPOINT_PREFIX, "").replace(PREFIX, "")


def dotted(path: str) -> str:
    """The plain prefix of names inside the module at ``path``."""
    return plain_path(path + ".").removeprefix(".")


def names_in_state(unit: FlatUnit, module: nn.Module) -> list[tuple[int, str]]:
    """Number and plain name of each of the unit's parameters, once for each place in the tree."""
    numbers: dict[nn.Module, list[tuple[int, str]]] = {}
    for number, owned in enumerate(unit.layout.parameters):
        for slot in owned.attributes:
            numbers.setdefault(slot.module, []).append((number, slot.name))
    found = []
    for path, inner in module.named_modules(remove_duplicate=False):
        for number, name in numbers.get(inner, []):
            found.append((number, dotted(path) + name))
    return found


def keys_below(state: Iterable[str], prefix: str) -> list[str]:
    """The keys that begin with ``prefix``, as a list, so that ``state`` can be changed during iteration."""
    return [key for key in state if key.startswith(prefix)]


def rename(state: MutableMapping[str, Any], old: str, new: str) -> None:
    """Replaces the prefix ``old`` by ``new``. Renamed keys keep their order, but move behind all other keys."""
    for key in keys_below(state, old):
        state[new + key.removeprefix(old)] = state.pop(key)


def add_plain_names(versions: MutableMapping[str, Any], prefix: str) -> None:
    """Adds the versions of modules, which ``state_dict()`` saves by path, under the plain names below ``prefix``.

    The paths are kept, because a plain module around wrappers uses them when it loads the dict.
    """
    for path in [path for path in versions if (path + ".").startswith(prefix + PREFIX)]:
        versions[(prefix + dotted((path + ".").removeprefix(prefix)[:-1]))[:-1]] = versions[path]


def with_versions(state: Any, module: nn.Module) -> Mapping[str, Any]:
    """A copy of ``state`` with the version of each module under its path in ``module``, for any wrapping."""
    # A wrapper and its module have the same plain name; the module comes later and its version is kept.
    versions = {dotted(path): version for path, version in state._metadata.items()}
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if dotted(path) in versions]
    copied = OrderedDict(state)
    copied._metadata = {path: versions[dotted(path)] for path in paths}  # type: ignore[attr-defined]
    return copied
