"""The names of FSDP that a test uses: those that `subject` offers for every engine, and those of minifsdp alone.

A test that uses names of minifsdp alone checks minifsdp's own code, or a feature that only minifsdp has. It does not
run with another engine. A test that uses no name of FSDP does not run either, because it checks a formula or a text.
The names in the functions that a test calls count, too, if these are functions of ``spec_tests``.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from spec_tests import subject

__all__ = ["Use", "use_of"]

PACKAGES = ("spec_tests", "spec_tools")  # the code of tests
OURS = ("minifsdp", "minifsdp_gloo", "minifsdp_tools")


@dataclass
class Use:
    """The names of FSDP that a test uses.

    Attributes:
        own: names of minifsdp alone, such as ``minifsdp.engine.unit``.
        public: names that `subject` offers.
    """

    own: set[str] = field(default_factory=set)
    public: set[str] = field(default_factory=set)


def use_of(item: pytest.Item) -> Use:
    """The names that a test uses, in its body, its arguments and the functions that it calls."""
    use, seen = Use(), set()
    test, homes = item.function, (*PACKAGES, item.module.__name__)
    arguments = getattr(item, "callspec", None)
    waiting: list[Any] = [getattr(test, "body_on_a_rank", test), arguments and arguments.params]
    while waiting:
        one = waiting.pop()
        one = getattr(one, "__func__", getattr(one, "__wrapped__", one))
        home = module_of(one)
        if id(one) in seen or home.startswith("spec_tests.harness"):
            continue
        seen.add(id(one))
        if home.split(".")[0] in OURS and home != "minifsdp.debugging.trace":
            use.own.add(home)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        elif home.startswith("spec_tests.subject") or not home.startswith(homes):
            continue
        elif isinstance(one, type):
            waiting += [*vars(one).values(), *one.__bases__]
        elif isinstance(one, types.FunctionType):
            waiting += one.__defaults__ or ()
            for code in codes(one.__code__):
                use.own |= {name for name in code.co_names if name.split(".")[0] in OURS and "." in name}
                use.own |= {"a program with minifsdp" for text in code.co_consts if is_program(text)}
                public = public_names(code, one.__globals__)
                use.public |= public
                names = {name: one.__globals__.get(name) for name in code.co_names if name not in public}
                waiting += values_of(code, names)
        elif not isinstance(one, types.ModuleType):
            waiting.append(type(one))
    return use


def public_names(code: types.CodeType, names: dict[str, Any]) -> set[str]:
    """The names in code that are values of `subject`, also under another name such as ``FSDP``, or its attributes."""
    values = {id(value) for name in subject.NAMES if (value := getattr(subject, name)) is not None}
    through = subject.NAMES if any(names.get(name) is subject for name in code.co_names) else ()
    read = {name: names.get(name) for name in code.co_names}
    return {
        name
        for name, value in read.items()
        if name in through or isinstance(value, subject.NotOffered) or id(value) in values
    }


def values_of(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """The values that code reads: globals, and attributes of the modules of the tests among them."""
    for name in code.co_names:
        value = names.get(name)
        yield value
        if isinstance(value, types.ModuleType) and value.__name__.startswith(PACKAGES):
            yield from (vars(value).get(attribute) for attribute in code.co_names)


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and the ones of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def is_program(text: object) -> bool:
    """Whether a constant is the text of a program that imports minifsdp."""
    return isinstance(text, str) and ("import minifsdp" in text or "from minifsdp" in text or text == "minifsdp")


def module_of(value: object) -> str:
    """The module that a value comes from; empty for instances and numbers."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    return getattr(value, "__module__", None) or ""
