"""Iterations that end with an exception of the user's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spec_tests.models.running import iterate


class Fault(Exception):
    """Raised intentionally."""


def fault(module_of: Callable[[Any], Any], moment: str, error: type[BaseException] = Fault) -> Callable[[Any], None]:
    """An iteration in which a module raises an error.

    Args:
        module_of: returns the module of a model.
        moment: ``before`` or ``after`` its forward, or ``backward``: when the gradient of its output has arrived.
        error: the class of the error. Ctrl+C raises `KeyboardInterrupt`.
    """

    def fail(*_: Any) -> None:
        raise error

    def run(model: Any) -> None:
        module = module_of(model)
        if moment == "before":
            handle = module.register_forward_pre_hook(fail)
        elif moment == "after":
            handle = module.register_forward_hook(fail)
        else:
            handle = module.register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
        with pytest.raises(error):
            iterate(model)
        handle.remove()

    return run


fail_in_forward = fault(lambda model: model.blocks[2], "before")
FAULTS: dict[str, Callable[[Any], None]] = {
    "forward": fail_in_forward,
    "inside": fault(lambda model: model.blocks[2].linear, "after"),
    "interrupt": fault(lambda model: model.blocks[2].linear, "after", KeyboardInterrupt),
    "first layer": fault(lambda model: model.enter, "after"),
    "last layer": fault(lambda model: model.leave, "after"),
    "backward": fault(lambda model: model.blocks[1].linear, "backward"),
    "backward of the last layer": fault(lambda model: model.leave, "backward"),
    "backward of the first layer": fault(lambda model: model.enter, "backward"),
}
