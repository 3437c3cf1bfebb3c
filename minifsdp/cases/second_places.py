"""Parameters that a module stores in a second place.

A module with the parameters of an LSTM keeps them in a list as well, and computes with this list::

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.all_weights = [self.weight]

        def forward(self, x):
            return x @ self.all_weights[0]

    model = Recurrent()
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()

Without this case, the list keeps the original parameter, so the forward computes with a tensor that no optimizer
updates. This module finds lists and dicts in the attributes of modules. The layout stores the tensor of each
parameter there as well, whenever it registers the tensor on the module. A tuple cannot be changed, so a parameter in a
tuple causes a warning.

*In torch:* ``fully_shard``, and FSDP1 with a flat parameter, compute with the original parameter, and the loss does not
change. With original parameters, the forward raises a size mismatch.

Spec: PROG-48.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from minifsdp.checks.ownership import taken
from minifsdp.engine.layout import ParamInfo, full_name
from minifsdp.engine.messages import message, warn


def find_second_places(
    modules: Iterable[tuple[str, nn.Module]], found: Mapping[nn.Parameter, ParamInfo]
) -> None:
    """Adds to each parameter in ``found`` the places where ``modules`` store it, apart from its own attribute."""
    for prefix, module in modules:
        for attribute, value in vars(module).items():
            for keys, parameter in (
                _parameters_in(value, (attribute,))
                if attribute != "_parameters"
                else ()
            ):
                if parameter in found and None not in keys:
                    found[parameter].second_places.append((vars(module), *keys))
                elif parameter in found or parameter in taken:
                    warn(
                        message(
                            "second-place",
                            place=full_name(prefix, attribute),
                            type=type(module).__name__,
                        )
                    )


def _parameters_in(
    value: Any, keys: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], nn.Parameter]]:
    """The parameters in nested lists, dicts and tuples, with their keys. A tuple has the key ``None``."""
    if isinstance(value, nn.Parameter):
        yield keys, value
    elif isinstance(value, list | dict | tuple) and len(keys) < 4:
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value)
        ):
            yield from _parameters_in(
                inner, (*keys, None if isinstance(value, tuple) else key)
            )
