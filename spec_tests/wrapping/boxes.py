"""Trees of modules without a process group: `Box` replaces the wrapper, so a test can compare units with torch's."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from minifsdp.fsdp1.wrap import auto_wrap, choose
from spec_tests.subject import size_based_auto_wrap_policy

at_least_40 = functools.partial(size_based_auto_wrap_policy, min_num_params=40)


class Box(nn.Module):
    """Replaces the wrapper: stores its arguments and does nothing else."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        self.kwargs = kwargs

    @property
    def module(self) -> nn.Module:
        return self._fsdp_wrapped_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Block(nn.Module):
    """Has a parameter of its own in addition to its submodules."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(7))
        self.parts = nn.ModuleList(parts)


class WideBlock(Block):
    pass


def linears() -> nn.Sequential:
    """120 elements: two layers of 30, and a submodule with two more layers."""
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))


def blocks() -> nn.Module:
    return Block(WideBlock(nn.Linear(3, 4), nn.BatchNorm1d(4)), Block(nn.Linear(6, 6), nn.LayerNorm(6)), nn.ReLU())


def boxes(root: nn.Module) -> dict[str, dict[str, Any]]:
    """The arguments of every `Box` in the tree, by the original path of the module inside."""
    found = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, Box):
            names = [name for name in path.split(".") if name != "_fsdp_wrapped_module"]
            found[".".join(names)] = module.kwargs
    return found


def cut(root: nn.Module, policy: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
    ignored = {name: kwargs.pop(name, ()) for name in ("ignored_modules", "ignored_params")}
    auto_wrap(root, policy, Box, kwargs, **ignored)
    return boxes(root)


def cut_by_torch(
    root: nn.Module,
    policy: Any,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    **kwargs: Any,
) -> dict[str, dict[str, Any]]:
    modules = {inner for module in ignored_modules for inner in module.modules()}
    parameters = {*ignored_params, *(p for module in modules for p in module.parameters())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _auto_wrap(root, policy, modules, parameters, {"mixed_precision": None, **kwargs}, Box)
    return boxes(root)


def chosen_paths(root: nn.Module, policy: Any, *args: Any) -> list[str]:
    paths = {module: path for path, module in root.named_modules()}
    return [paths[module] for module in choose(root, policy, *args)]
