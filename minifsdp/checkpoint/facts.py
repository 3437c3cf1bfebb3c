"""Facts about the optimizer's states, which ranks can compare and send without sending the states.

A tensor with the parameter's own shape has a value *per element* and is sharded like the parameter. Its fact is its
dtype. Any other state, such as Adam's ``step``, a number or ``None``, applies to the *whole* parameter. Its fact is its
value. Worked example, Adam after one step, the states of one parameter and their facts::

    states    {"step": tensor(1.), "exp_avg": 2 x 3}
    facts     {"step": Number(torch.float32, 1.0), "exp_avg": PerElement(torch.float32)}

*In torch:* ``_ParamAllGather`` and similar records in ``_optim_utils.py``.

Spec: OSD-06, OSD-08.
"""

import copy
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minifsdp.checkpoint.codec import NamedOptimizer

# By name of the parameter and name of the state, its fact or its converted value.
Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class PerElement:
    """A state with one value per element of the parameter. Other ranks only need its dtype.

    Attributes:
        shape: a shape that is not the parameter's. Such a tensor cannot be sharded, so only unsharded parameters may
            have one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, repr=False)
class Number:
    """A state that is a 0-d tensor: one value for the whole parameter."""

    dtype: torch.dtype
    value: Any

    def __repr__(self) -> str:
        return f"{self.value} ({self.dtype})"


def facts_of(
    entries: Mapping[str, Any], shape: torch.Size, elementwise: Container[str]
) -> dict[str, Any]:
    """The facts of one parameter by name of the state.

    Args:
        entries: the states.
        shape: the shape of the parameter.
        elementwise: names of states that are per element if both the state and the parameter are 0-d.
    """
    facts: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            facts[key] = value
        elif value.ndim == 0 and (shape or key not in elementwise):
            facts[key] = Number(value.dtype, value.item())
        else:
            facts[key] = PerElement(
                value.dtype, None if value.size() == shape else tuple(value.size())
            )
    return facts


def copied(value: Any, *, offload: bool = False) -> Any:
    """A copy of a value in its own memory, because an optimizer increments its step counter in place."""
    if isinstance(value, Number):
        return torch.tensor(value.value, dtype=value.dtype, device="cpu")
    if isinstance(value, torch.Tensor):
        return value.to("cpu" if offload else value.device, copy=True)
    # Also copies lists of tensors: some optimizers keep a history.
    return copy.deepcopy(value)


def facts_given(target: NamedOptimizer, state: Mapping[str, Any]) -> Facts:
    """The facts of a dict about parameters in units. Nothing is communicated."""
    found = [(key, tensor) for _, key, tensor in tensors_in(state, target)]
    # A 0-d value for a 0-d parameter is ambiguous. A state that has dimensions for any parameter is per element. If all
    # parameters are 0-d, all states except the step counter are per element.
    elementwise = {key for key, tensor in found if tensor.ndim} or {
        key for key, _ in found if key != "step"
    }
    return {
        name: facts_of(state[name], unit.shapes[name], elementwise)
        for name, unit in target.unit_of.items()
        if name in state
    }


def tensors_in(
    state: Mapping[str, Any], target: NamedOptimizer
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """All tensors in a dict's parameter states, with the names of the parameter and the state."""
    for name in target.owners:
        for key, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                yield name, key, value
