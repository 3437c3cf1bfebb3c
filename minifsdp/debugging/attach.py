"""Lets a debugging check observe the engine while the check is on.

The modules of the training step contain no code of the checks in this folder. A check that is on replaces a method by a
wrapper, which calls the method and then the functions of the check::

    IterationState.pre_forward        the method itself, while no check is on
    IterationState.pre_forward        observed(): the method, then ``values`` inspects the unsharded parameters

Several checks may observe one method. The first check installs the wrapper, and the end of the last one restores the
original method. So a check that is off costs nothing, not even a condition.

Worked example: ``with attached(RootState, "end_forward", look):`` calls ``look(result, root_state)`` after each call
of ``end_forward`` inside the block, for all root states, also for those created before.

Some checks need the complete model. For instance, a model on the meta device gets its values after ``fully_shard``, so
the check for missing values runs before the first forward (`at_first_use`). Other checks run when a unit is created. If
such a check is turned on later, a warning names the units that it has missed (`warn_about_late_units`).

Worked example: ``fully_shard(a)``, ``minifsdp.debug("weights")``, ``fully_shard(b)``, then the first forward of both.
Unit ``b`` was checked and unit ``a`` was not, so the warning names ``a``.

*In torch:* debugging code checks a condition in each step, ``if self._debug_level``.

Spec: DEBUG-03, DEBUG-09, DEBUG-10.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from minifsdp.engine.messages import message, warn
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Unit
from minifsdp.fsdp1.wrapper import Wrapper
from minifsdp.fsdp2.fsdp_state import FSDPState

Look = Callable[..., None]
_observed: dict[tuple[Any, str], list[Look]] = {}


@contextmanager
def attached(owner: Any, name: str, look: Look) -> Iterator[None]:
    """Calls ``look`` after each call of a method inside the block. Does not communicate.

    Args:
        owner: the class that defines the method, or a module that calls a function.
        name: the name of the method or function.
        look: called with the result of the method and then the same arguments. Not called after an exception.
    """
    looks = _observed.setdefault((owner, name), [])
    method = vars(owner)[name]

    @functools.wraps(method)
    def observed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        for each in looks:
            each(result, *args, **kwargs)
        return result

    if not looks:
        setattr(owner, name, observed)
    looks.append(look)
    try:
        yield
    finally:
        looks.remove(look)
        if not looks:
            setattr(owner, name, vars(owner)[name].__wrapped__)


@contextmanager
def at_first_use(
    look: Callable[[Sequence[nn.Module], RootState], None],
) -> Iterator[None]:
    """Calls ``look`` before the first forward of each root inside the block, with the outermost modules and the root.

    If ``look`` raises an error, it is called again before the next forward.
    """
    known: weakref.WeakSet[RootState] = weakref.WeakSet()

    def before_forward(root_state: RootState, outermost: Wrapper | FSDPState) -> None:
        if root_state not in known:
            look(
                [outermost] if isinstance(outermost, Wrapper) else outermost.modules,
                root_state,
            )
            known.add(root_state)

    with (
        attached(Wrapper, "_current_root_state", before_forward),
        attached(FSDPState, "current_root_state", before_forward),
    ):
        yield


@contextmanager
def warn_about_late_units(check: str) -> Iterator[None]:
    """Inside the block, issues one warning for each root with units that were created before the block.

    Args:
        check: the name of the check that has missed them.
    """
    in_time: weakref.WeakSet[Unit] = weakref.WeakSet()

    def name_late_units(_: Sequence[nn.Module], root_state: RootState) -> None:
        if late := [
            unit.name or "the root" for unit in root_state.units if unit not in in_time
        ]:
            warn(message("debug-too-late", check=check, units=late))

    with (
        attached(Unit, "__init__", lambda _, unit, *args, **kwargs: in_time.add(unit)),
        at_first_use(name_late_units),
    ):
        yield
