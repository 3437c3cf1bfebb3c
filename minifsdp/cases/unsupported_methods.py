"""Methods of torch's ``FSDPModule`` that are not supported: they raise an error that names an alternative.

A program calls a method that only the installed version of torch has, here a version after 2.15::

    fully_shard(model)
    model.a_method_of_the_next_version()

Without this case, the method of torch runs, because torch's class is a base class of each sharded module. It looks for
the attributes of torch's state, and raises an ``AttributeError`` that names neither the method nor a remedy.

The case is a line of ``added_methods.py``, and `without_methods` replaces torch's class among the base classes.

*In torch:* these methods choose the memory and the streams of a unit.

Spec: NEW-10, NEW-18, NEW-26.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from minifsdp.checks.arguments import Kind, require
from minifsdp.engine.messages import message

INTEGER = Kind(
    "an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)
)
POSITIVE = Kind("at least 1", lambda value: value >= 1, ValueError)


class UnsupportedMethods:
    """Methods that raise an error, or that have no effect."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect (NEW-10): collectives here always sum, and the division is a separate step."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """No effect (NEW-18): the number is an upper limit, and at most one reduction is in flight here.

        Raises:
            TypeError: if the value is not an integer, or is a bool.
            ValueError: if the value is smaller than 1.
        """
        call = "set_reduce_scatter_max_input_buffers"
        require(INTEGER, call, max_input_buffers=max_input_buffers)
        require(POSITIVE, call, max_input_buffers=max_input_buffers)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect (NEW-18). In torch, it sets the stream that allocates the memory of all-gathers."""


def without_methods(theirs: type[Any], ours: type[Any]) -> type[Any]:
    """A subclass of torch's class. Methods that ``ours`` does not have raise an error, because they need its state."""
    names = [
        name
        for name, found in vars(theirs).items()
        if callable(found) and not hasattr(ours, name)
    ]
    return type(theirs.__name__, (theirs,), {name: _refusal(name) for name in names})


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise _not_offered(name, "torch.distributed.fsdp.fully_shard")

    return refuse


def _not_offered(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(message("not-offered", what=what, instead=instead))
