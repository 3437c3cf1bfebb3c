"""Activations that the program takes from inside a unit, without the output of the unit.

A loss may depend on a tensor that a module keeps as an attribute, or that the program's forward hook has seen. If no
output of the unit is part of the loss, no pre-backward hook would run, and autograd would read freed parameters. So
these tensors get the pre-backward hook as well::

    class Block:
        def forward(self, x):
            self.balance = self.router(x).var()       # an attribute: found after the first recorded forward
            return self.experts(x)

    block.experts.register_forward_hook(keep)         # a hook: found before the next forward

* *Attributes.* After the first recorded forward, `SideOutputs` looks for tensors with a graph in the attributes of all
  modules inside units, also in lists, tuples and dicts. Later forwards only look at the attributes that had one.
* *Forward hooks.* If the number of forward hooks of a module inside a unit has changed, the hooked modules get one more
  hook, except the modules of the units themselves. It registers the pre-backward hook on their outputs.

Without this case, the backward of a loss of such tensors reads parameters whose memory was freed.

*In torch:* FSDP1 and FSDP2 raise an error about a storage that is too small.

Spec: PROG-27, PROG-28.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from minifsdp.engine.backward_hooks import (
    NOT_IN_BACKWARD,
    graph_task,
    register_pre_backward_hook,
)
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Unit

# The attributes of `nn.Module` itself.
OF_MODULES = frozenset(vars(nn.Module()))
# The key of the added hook in the forward hooks of a module.
WATCH = "minifsdp: side outputs"


class SideOutputs:
    """The activations of one root that are kept in attributes of modules or seen by forward hooks.

    Args:
        root_state: the root.
    """

    def __init__(self, root_state: RootState) -> None:
        units = root_state.units
        self._iteration = root_state.iteration
        outputs = {module for unit in units for module in unit.modules}
        # The innermost unit of each module.
        self._unit_of: dict[nn.Module, Unit] = {}
        found = [
            (list(module.modules()), unit) for unit in units for module in unit.modules
        ]
        for inside, unit in sorted(found, key=lambda one: -len(one[0])):
            self._unit_of.update(dict.fromkeys(inside, unit))
        self._inside = [module for module in self._unit_of if module not in outputs]
        self._hooks: list[dict[Any, Any]] = [
            module._forward_hooks for module in self._inside
        ]
        self._num_hooks: list[int] = []
        # The attributes that had a tensor with a graph: the unit, the dict of the module, and the name.
        self._attributes: list[tuple[Unit, dict[str, Any], str]] | None = None
        self._watched = WeakTensorKeyDictionary()
        root_state.iteration.points.forward_begins.append(self.watch_hooked_modules)
        root_state.iteration.points.forward_ends.append(self.watch_attributes)

    def watch_hooked_modules(self) -> None:
        """Called before a forward: adds a hook to each module that has forward hooks of the program."""
        if list(map(len, self._hooks)) != self._num_hooks:
            for module, hooks in zip(self._inside, self._hooks, strict=True):
                if hooks and WATCH not in hooks:
                    hooks[WATCH] = partial(self._watch, self._unit_of[module])
            self._num_hooks = list(map(len, self._hooks))

    def watch_attributes(self, output: Any) -> Any:
        """Called after a forward: registers the pre-backward hook on tensors in attributes, if autograd records it."""
        if not self._iteration.is_recorded:
            return output
        if self._attributes is None:
            # A unit that stays unsharded may have views of its parameters as attributes.
            parameters = {
                (place.module, place.name)
                for unit in self._iteration.units
                for info in unit.layout.param_infos
                for place in info.places
            }
            self._attributes = [
                (unit, vars(module), name)
                for module, unit in self._unit_of.items()
                for name in vars(module)
                if (module, name) not in parameters
                and name not in OF_MODULES
                and _kept_in(vars(module), name)
            ]
        for unit, values, name in self._attributes:
            # A tensor may stay for many forwards, and needs one hook. If the unit's forward
            # was not recorded, the output of an autograd function is taken for that of
            # reentrant checkpointing, which records the forward in backward.
            new = [
                tensor
                for tensor in _kept_in(values, name)
                if tensor not in self._watched
                and (
                    unit.uses.awaits_backward
                    or not isinstance(tensor.grad_fn, BackwardCFunction)
                )
            ]
            self._watched.update((tensor, True) for tensor in new)
            self._watch(unit, None, None, new)
        return output

    def _watch(self, unit: Unit, _: nn.Module | None, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and graph_task() == NOT_IN_BACKWARD:
            register_pre_backward_hook(
                [output], lambda _: self._iteration.pre_backward(unit)
            )


def _kept_in(attributes: dict[str, Any], name: str) -> list[torch.Tensor]:
    """The tensors with a graph in an attribute."""
    return [
        tensor
        for tensor in _tensors_in(attributes.get(name))
        if tensor.grad_fn is not None
    ]


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts. Other containers may raise errors when they are read."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and (isinstance(value, list | tuple) or type(value) is dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth - 1)
