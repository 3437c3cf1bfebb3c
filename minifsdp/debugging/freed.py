"""Debug check ``memory``: raises an error if the program reads a parameter whose unsharded memory is freed.

A hook can keep a weight, and a module can return a view of one. After the forward of the unit, the memory of the weight
is freed, but the kept tensor still has its shape::

    kept.append(module.weight)          # in a forward hook: not a copy
    model(x)                            # frees the unsharded parameters
    kept[0].sum()                       # reads an address that is no longer valid: the process ends

PyTorch does not check this, and on a GPU the error appears at a later line. With this check, every operation first
checks the memory of its arguments.

Worked example: ``kept[0].sum()`` above raises "aten.sum.default reads an unsharded parameter of unit '0'".

Cost: one Python call for each operation, also in backward.

*In torch:* not checked; the process ends with a segmentation fault.

Spec: DEBUG-13.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp.debugging.attach import attached
from minifsdp.engine.messages import message
from minifsdp.engine.precision import tensors_in
from minifsdp.engine.unit import Unit


class _FreedMemory(TorchDispatchMode):
    """Checks the arguments of each operation.

    Args:
        units: the units that were resharded inside the block.
    """

    def __init__(self, units: weakref.WeakSet[Unit]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = units

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises an error if ``func`` reads freed memory of a unit, and runs ``func`` otherwise."""
        for value in tensors_in((args, kwargs or {})):
            if (
                type(value) in (Tensor, nn.Parameter)
                and value.numel()
                and not value.untyped_storage().nbytes()
            ):
                self._refuse(func, value)
        return func(*args, **kwargs or {})

    def _refuse(self, func: Any, tensor: Tensor) -> None:
        freed = tensor.untyped_storage()
        for unit in self._units:
            if any(leaf.untyped_storage() is freed for leaf in unit.layout.leaves):
                raise RuntimeError(
                    message(
                        "freed-memory",
                        operation=func,
                        shape=tuple(tensor.shape),
                        unit=unit.name,
                    )
                )


@contextmanager
def check_memory() -> Iterator[None]:
    """Checks every operation inside the block, in the thread that enters it and in its backwards."""
    units: weakref.WeakSet[Unit] = weakref.WeakSet()
    with (
        attached(Unit, "reshard", lambda _, unit, *args, **kwargs: units.add(unit)),
        _FreedMemory(units),
    ):
        yield
