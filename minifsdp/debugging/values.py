"""Where did the first ``nan`` come from? Looked for unit by unit, and told on every rank at once.

One value that is not finite makes the loss ``nan`` some units later, and a reduction hands it to all ranks. Then all of
them have it everywhere, and where it began is not to be seen any more. So three kinds of values are looked at where
they come up, the last one before any other rank has its part in it:

=============  =================================================  ==========================================
parameter      when a unit was gathered for its forward           a broken checkpoint, a step that went wrong
activation     what the unit's module returns                     an overflow, a logarithm of zero, bad data
gradient       of each parameter, before the reduction            a loss that is too large, a root at zero
=============  =================================================  ==========================================

Each rank keeps the first that it sees and goes on, for the others are on their way to the next collective. At the end
of the forward, and again at the end of backward, one number is summed over all ranks: does any of them have something?
If so, all raise together, with the first place of each rank that has one::

    rank 1: gradient of 'blocks.2.linear.weight' before it was reduced: 3 nan and 0 inf among 36 values

A sum of the values is enough to know that all are finite, and only if it is not they are counted. Price: each value is
read once more, and the CPU waits for an accelerator at each unit.

A scaler that looks for overflows on purpose (``ShardedGradScaler``) makes gradients that are not finite now and then;
with it, turn on the other checks.

*In torch:* ``torch.autograd.set_detect_anomaly`` finds ``nan`` in backward, on the rank that has it, and leaves the
others waiting.

Spec: DEBUG-05, DEBUG-06.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.checkpoint.agreement import groups_of, tell
from minifsdp.debugging.attach import attached
from minifsdp.engine import collectives
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.hooks import Cycle
from minifsdp.engine.layout import Gradient, Layout
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import detail, message
from minifsdp.engine.partition import local_part
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.precision import tensors_in
from minifsdp.engine.root import Root
from minifsdp.engine.unit import Phase, Unit


class Counts(NamedTuple):
    """How much of a tensor is not finite."""

    nan: int
    inf: int
    numel: int

    def __str__(self) -> str:
        return f"{self.nan} nan and {self.inf} inf among {self.numel} values"


# What this rank has found since ranks agreed last, in the order of finding; the first of each unit.
_found: weakref.WeakKeyDictionary[Layout, str] = weakref.WeakKeyDictionary()


@contextmanager
def looked_at() -> Iterator[None]:
    """Inside the block the values of all units are looked at."""
    places = (
        (Root, "begin_forward", _after_begin),
        (Cycle, "pre_forward", _after_gather),
        (Cycle, "watch_output", _after_module),
        (Root, "end_forward", _after_forward),
        (FlatLayout, "take_gradient", _after_gradient),
        (PerParameterLayout, "take_gradient", _after_gradient),
        (Cycle, "end_backward", _after_backward),
    )
    with ExitStack() as stack:
        for owner, name, look in places:
            stack.enter_context(attached(owner, name, after=look))
        stack.callback(_found.clear)
        yield


# --- where values come up ---


def _after_begin(is_outermost: bool, tree: Root, caller: Unit | None = None) -> None:
    if is_outermost:
        # Of an iteration that was broken off.
        _forget(tree.units)


def _after_gather(_: None, cycle: Cycle, unit: Unit) -> None:
    if unit.phase is not Phase.FORWARD:
        return
    layout = unit.layout
    slots = [owned.slots[0] for owned in layout.parameters]

    def describe(number: int, counts: Counts) -> str:
        return detail("parameter-not-finite", name=layout.full_name(slots[number].path), counts=counts)

    _look(layout, [getattr(slot.module, slot.name) for slot in slots], describe)


def _after_module(_: bool, cycle: Cycle, unit: Unit, inputs: Any, output: Any) -> None:
    outputs = list(tensors_in(output))

    def describe(number: int, counts: Counts) -> str:
        which = f", tensor {number + 1} of {len(outputs)}," if len(outputs) > 1 else ""
        return detail("output-not-finite", which=which, unit=unit.name, counts=counts)

    _look(unit.layout, outputs, describe)


def _after_gradient(gradient: Gradient | None, layout: Layout, *, with_unreduced: bool) -> None:
    if gradient is None:
        return
    parts, numbers = gradient.parts, gradient.numbers
    if isinstance(layout, FlatLayout):
        # One row; what is behind the last parameter is padding.
        parts, numbers = list(parts[0].split(layout.partition.split_sizes)), list(range(len(layout.parameters)))

    def describe(number: int, counts: Counts) -> str:
        path = layout.parameters[numbers[number]].path
        return detail("gradient-not-finite", name=layout.full_name(path), counts=counts)

    _look(layout, parts[: len(numbers)], describe)


@torch.no_grad()
def _look(layout: Layout, tensors: Sequence[torch.Tensor], describe: Callable[[int, Counts], str]) -> None:
    if layout in _found:
        return
    values = [local_part(tensor.detach()) for tensor in tensors]
    sums = [value.sum() for value in values if value.is_floating_point() or value.is_complex()]
    # One question for all of them, so that an accelerator is waited for once.
    if not sums or bool(sum(sums[1:], sums[0]).isfinite()):
        return
    for number, value in enumerate(values):
        counts = Counts(int(value.isnan().sum()), int(value.isinf().sum()), value.numel())
        # There need be none: a sum can overflow by itself.
        if counts.nan or counts.inf:
            _found[layout] = describe(number, counts)
            return


# --- where ranks agree ---


def _after_forward(_: None, tree: Root) -> None:
    # Where nothing is sent in an evaluation, ranks need not come here together.
    if tree.cycle.is_recorded or any(unit.plan.mesh.shard is not None for unit in tree.units):
        _agree(tree.units, "forward", tree.fail_forward)


def _after_backward(_: None, cycle: Cycle) -> None:
    _agree(cycle.units, "backward")


def _agree(units: Sequence[Unit], what: str, tidy: Callable[[], None] | None = None) -> None:
    """Raises on every rank if any has found something. All ranks of the tree must call it.

    Args:
        units: of the tree.
        what: is over.
        tidy: is called before the error is raised.
    """
    mine = _forget(units)[:1]
    groups = groups_of(plan.mesh for unit in units for plan in unit.plans)
    if not units or not _anybody(groups, bool(mine), units[0].layout.device):
        return
    places = [f"rank {rank}: {place}" for rank, found in tell(groups, mine).items() for place in found]
    if tidy is not None:
        tidy()
    raise RuntimeError(message("not-finite", what=what, places="\n".join(places)))


def _anybody(groups: Sequence[Group], has_one: bool, device: torch.device) -> bool:
    # As with the check of the order: who counts what training sends does not see it.
    with _disable_current_modes():
        number = torch.tensor([float(has_one)], device=device)
        for group in groups:
            # From the ranks of one group it goes on to those of the next.
            collectives.all_reduce(group, number).wait()
        return bool(number)


def _forget(units: Sequence[Unit]) -> list[str]:
    layouts = {unit.layout for unit in units}
    mine = [layout for layout in list(_found) if layout in layouts]
    return [_found.pop(layout) for layout in mine]
