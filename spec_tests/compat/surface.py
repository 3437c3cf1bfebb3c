"""The public surface of a package as plain facts, and the differences between two packages.

A *fact* is a list of words about one name, without annotations and without the library that defines it::

    CPUOffload                   dataclass
    CPUOffload.offload_params    field 0, offload_params = False

`differences` compares the facts of torch's modules with those of minifsdp's and describes each difference::

    {"FullyShardedDataParallel()": "with `keyword fsdp_auto_wrap_policy = None`", "wrap._wrap": "missing"}
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn

__all__ = ["MODULES", "differences", "names_of"]

TORCH = "torch.distributed.fsdp"
STATE_DICT = "torch.distributed.checkpoint.state_dict"
# Torch's modules with the prefix of their names, and the module of minifsdp that has the same names.
MODULES = [
    ("", TORCH, "minifsdp"),
    ("fully_sharded_data_parallel.", f"{TORCH}.fully_sharded_data_parallel", "minifsdp.fully_sharded_data_parallel"),
    ("wrap.", f"{TORCH}.wrap", "minifsdp.wrap"),
    ("api.", f"{TORCH}.api", "minifsdp.api"),
    ("sharded_grad_scaler.", f"{TORCH}.sharded_grad_scaler", "minifsdp.sharded_grad_scaler"),
    ("_fully_shard.", f"{TORCH}._fully_shard", "minifsdp"),
    ("_fully_shard.", f"{TORCH}._fully_shard._fsdp_api", "minifsdp"),
    ("state_dict.", STATE_DICT, "minifsdp.compat.state_dict_functions"),
]
# Private names that programs import, in addition to those that docstrings name.
PROGRAMS_IMPORT = ["_Policy", "_module_wrap_policy", "_or_policy", "_recursive_wrap"]
# Private attributes of classes that programs use.
PROGRAMS_READ = ["_set_unshard_async_op", "_get_fsdp_state", "_run_policy", "_use_dtensor", "_module_classes_to_ignore"]
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional ",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword ",
    inspect.Parameter.VAR_KEYWORD: "**",
}
Facts = dict[str, list[str]]


# --- which names ---


def names_of(module: ModuleType) -> list[str]:
    """The names that a program can import from ``module``: public ones, and private ones that docstrings name."""
    # The module of state dicts imports many names of FSDP, which belong to FSDP's modules.
    listed = {*getattr(module, "__all__", [])}
    if module.__name__ != STATE_DICT:
        listed |= {name for name, value in vars(module).items() if not name.startswith("_") and _belongs(value)}
    texts = " ".join(inspect.getdoc(vars(module)[name]) or "" for name in listed)
    named = {name for name in re.findall(r"\b_[a-z]\w+", texts) if name in vars(module)}
    imported = {name for name in PROGRAMS_IMPORT if name in vars(module)}
    return sorted(listed | named | imported)


def _belongs(value: Any) -> bool:
    """Whether a value is a part of FSDP, and not a module or a helper of Python that the file has imported."""
    if isinstance(value, (type, FunctionType)):
        return value.__module__.startswith((TORCH, "minifsdp"))
    # Type aliases, such as `FQNS_T`, have the module `typing` too.
    is_alias = hasattr(value, "__args__")
    return is_alias or isinstance(value, (str, list, tuple, enum.Enum))


# --- facts ---


def words_of_default(default: Any) -> str:
    """A text for a default value that does not depend on the library that defines its class."""
    if default is inspect.Parameter.empty:
        return ""
    if isinstance(default, enum.Enum):
        return f" = {type(default).__name__}.{default.name}"
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        # The defaults of the fields are facts of their own.
        changed = [f for f in dataclasses.fields(default) if getattr(default, f.name) != f.default]
        values = ", ".join(f"{f.name}={getattr(default, f.name)!r}" for f in changed)
        return f" = {type(default).__name__}({values})"
    return f" = {default.__qualname__ if isinstance(default, type) else repr(default)}"


def words_of_call(function: Any) -> list[str]:
    """Names, order, kinds and defaults of the parameters."""
    parameters = inspect.signature(function).parameters.values()
    words = [f"{KINDS[p.kind]}{p.name}{words_of_default(p.default)}" for p in parameters]
    attributes = {name: value for name, value in vars(function).items() if name.isupper()}
    return words + [f"attribute {name} = {attributes[name]}" for name in sorted(attributes)]


def words_of_class(cls: type, other: Any) -> Iterator[str]:
    """The kind of a class, and its base classes that have a name in both libraries."""
    if issubclass(cls, enum.Enum):
        yield "enum"
        yield from (f"{member.name} = {member.value}" for member in cls)
    if dataclasses.is_dataclass(cls):
        yield "dataclass"
        yield from (name for name in ("eq", "order", "frozen") if getattr(cls.__dataclass_params__, name))
    bases = {base.__name__: base for base in cls.__mro__[1:-1] if base.__name__ != cls.__name__}
    names = {base.__name__ for base in getattr(other, "__mro__", ())}
    for name, base in bases.items():
        # minifsdp has more base classes, which are internal.
        if name in names or not base.__module__.startswith("minifsdp") or hasattr(torch_fsdp, name):
            yield f"base {name}"


def attributes_of(cls: Any) -> set[str]:
    """Public attributes that the class, or a base class in its own library, adds or overrides."""
    own = [base for base in getattr(cls, "__mro__", ()) if base.__module__.startswith((TORCH, "minifsdp"))]
    found = {name for base in own for name in vars(base) if not name.startswith("_") or name in PROGRAMS_READ}
    # `FSDPModule` may override methods that every module has (FUZZ-04).
    return found if getattr(cls, "__name__", "") != "FSDPModule" else {n for n in found if not hasattr(nn.Module, n)}


def facts_of_class(name: str, cls: type, other: Any) -> Facts:
    found = {name: list(words_of_class(cls, other))}
    if issubclass(cls, enum.Enum):
        return found
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    for number, field in enumerate(fields):
        default = field.default_factory() if callable(field.default_factory) else field.default
        default = inspect.Parameter.empty if default is dataclasses.MISSING else default
        word = f"{field.name}{words_of_default(default)}" + ("" if field.init else ", not an argument")
        found[f"{name}.{field.name}"] = [f"field {number}", word]
    if not fields:
        found[f"{name}()"] = words_of_call(cls)
    for attribute in sorted((attributes_of(cls) | attributes_of(other)) - {field.name for field in fields}):
        value = inspect.getattr_static(cls, attribute, None)
        if isinstance(value, property):
            found[f"{name}.{attribute}"] = ["property"]
        elif callable(value) or isinstance(value, staticmethod):
            kind = ["static"] if isinstance(value, staticmethod) else []
            found[f"{name}.{attribute}"] = ["call", *kind, *words_of_call(getattr(cls, attribute))]
    return found


def facts_of(name: str, value: Any, other: Any) -> Facts:
    """Facts about one name. A class also has facts about attributes of ``other``, the value in the other library."""
    if isinstance(value, type):
        return facts_of_class(name, value, other)
    if callable(value) and not hasattr(value, "__args__"):
        return {name: ["call", *words_of_call(value)]}
    # `Union[A, B]` and `A | B` are the same type.
    return {name: [repr(part) for part in getattr(value, "__args__", (value,))]}


# --- comparing ---


def described(theirs: list[str] | None, ours: list[str] | None) -> str:
    """The difference between two facts."""
    if ours is None:
        return "missing"
    if theirs is None:
        return "only here"
    parts = [f"without `{word}`" for word in theirs if word not in ours]
    parts += [f"with `{word}`" for word in ours if word not in theirs]
    return ", ".join(parts) or "in another order"


def differences_of(name: str, theirs: Any, ours: Any) -> dict[str, str]:
    """The differences of one name in two libraries."""
    if ours is None:
        return {name: "missing"}
    expected = facts_of(name, theirs, ours)
    present = facts_of(name, ours, theirs)
    different = [key for key in {**expected, **present} if expected.get(key) != present.get(key)]
    return {key: described(expected.get(key), present.get(key)) for key in different}


def differences() -> dict[str, str]:
    """All differences of the installed torch to minifsdp, by name."""
    found: dict[str, str] = {}
    compared: set[tuple[int, int]] = set()
    for prefix, torch_path, path in MODULES:
        theirs, ours = importlib.import_module(torch_path), importlib.import_module(path)
        for name in names_of(theirs):
            pair = getattr(theirs, name), getattr(ours, name, None)
            # The same pair of objects can have several paths. The first one names it.
            ids = id(pair[0]), id(pair[1])
            if ids not in compared:
                compared.add(ids)
                found |= differences_of(prefix + name, *pair)
    return found
