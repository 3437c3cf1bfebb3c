"""Iterations that end with an exception of the user's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from spec_tests.models.apis import Api
from spec_tests.models.running import batch, iterate, loss_of


class Fault(Exception):
    """Raised intentionally."""


def fail(*_: Any) -> None:
    raise Fault


def fail_in_forward(model: Any) -> None:
    """Raises before the forward of a unit."""
    hook = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(Fault):
        model(batch())
    hook.remove()


def fail_inside_of_a_block(model: Any) -> None:
    """Raises while a unit is unsharded for its forward."""
    hook = model.blocks[2].linear.register_forward_hook(fail)
    with pytest.raises(Fault):
        model(batch())
    hook.remove()


def interrupt_a_block(model: Any) -> None:
    """Interrupts the program, as the user does with Ctrl+C, while a unit is unsharded for its forward."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[2].linear.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    hook.remove()


def fail_in_backward(model: Any) -> None:
    """Raises while a unit is unsharded for its backward."""

    def observe(layer: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    hook = model.blocks[1].linear.register_forward_hook(observe)
    loss = loss_of(model(batch()))
    with pytest.raises(Fault):
        loss.backward()
    hook.remove()


FAULTS: dict[str, Callable[[Any], None]] = {
    "forward": fail_in_forward,
    "inside": fail_inside_of_a_block,
    "interrupt": interrupt_a_block,
    "backward": fail_in_backward,
}


def fail_with_unreduced_gradients(api: Api, model: Any, fault: str = "forward") -> None:
    """Raises after a micro-batch, of step 7, whose gradients were not reduced."""
    with api.no_sync(model):
        iterate(model, 7)
        FAULTS[fault](model)
