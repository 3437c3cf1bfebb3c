"""Calls checks before the first forward of a root, and reports units that were created before a check was turned on.

Some checks need the complete model. For instance, a model on the meta device gets its values after ``fully_shard``, so
the check for missing values runs before the first forward. Other checks run when a unit is created. If such a check is
turned on later, a warning names the units that it has missed.

Worked example: ``fully_shard(a)``, ``minifsdp.debug("weights")``, ``fully_shard(b)``, then the first forward of both.
Unit ``b`` was checked and unit ``a`` was not, so the warning names ``a``.

*In torch:* nothing similar.

Spec: DEBUG-09, DEBUG-10.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from minifsdp.debugging.attach import attached
from minifsdp.engine.messages import message, warn
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Unit
from minifsdp.fsdp1.wrapper import Wrapper
from minifsdp.fsdp2.fsdp_state import FSDPState


@contextmanager
def at_first_use(look: Callable[[Sequence[nn.Module], RootState], None]) -> Iterator[None]:
    """Calls ``look`` before the first forward of each root inside the block, with the outermost modules and the root.

    If ``look`` raises an error, it is called again before the next forward.
    """
    known: weakref.WeakSet[RootState] = weakref.WeakSet()

    def before_forward(root_state: RootState, outermost: Wrapper | FSDPState) -> None:
        if root_state not in known:
            look([outermost] if isinstance(outermost, Wrapper) else outermost.modules, root_state)
            known.add(root_state)

    with (
        attached(Wrapper, "_current_root_state", before_forward),
        attached(FSDPState, "current_root_state", before_forward),
    ):
        yield


@contextmanager
def late_units_named(check: str) -> Iterator[None]:
    """Inside the block, issues one warning for each root with units that were created before the block.

    Args:
        check: the name of the check that has missed them.
    """
    in_time: weakref.WeakSet[Unit] = weakref.WeakSet()

    def note(_: None, unit: Unit, *args: Any, **kwargs: Any) -> None:
        in_time.add(unit)

    def name_late_units(_: Sequence[nn.Module], root_state: RootState) -> None:
        late = [unit.name or "the root" for unit in root_state.units if unit not in in_time]
        if late:
            warn(message("debug-too-late", check=check, units=late))

    with attached(Unit, "__init__", note), at_first_use(name_late_units):
        yield
