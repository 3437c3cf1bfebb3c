"""Debug check ``values``: finds the first ``nan`` or ``inf``, and reports it on every rank.

One value that is not finite makes the loss ``nan`` some units later, and a reduction sends it to all ranks. Then the
origin cannot be found any more. So three kinds of values are checked when they are created, in the case of gradients
before the reduction mixes them with those of other ranks:

=============  =================================================  ==========================================
values         checked                                            typical cause
=============  =================================================  ==========================================
parameter      after the all-gather for the unit's forward        a broken checkpoint, a bad optimizer step
activation     the output of the unit's module                    an overflow, a logarithm of zero, bad data
gradient       of each parameter, before the reduction            a loss that is too large, a root at zero
=============  =================================================  ==========================================

Each rank records the first such value and continues, because other ranks are about to issue the next collective. At the
end of forward and of backward, one number is summed over all ranks: 1 for a rank with a record, 0 otherwise. If the sum
is not zero, all ranks raise an error, with the first record of each rank::

    rank 1: gradient of 'blocks.2.linear.weight' before it was reduced: 3 nan and 0 inf among 36 values

A finite sum proves that all values are finite. They are counted only if the sum is not finite. Cost: each value is read
one more time, and the CPU waits for an accelerator at each unit.

Do not use this check with a scaler that causes overflows on purpose (``ShardedGradScaler``).

*In torch:* ``torch.autograd.set_detect_anomaly`` finds ``nan`` in backward on one rank, and the other ranks wait.

Spec: DEBUG-05, DEBUG-06.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.checks.details import detail
from minifsdp.debugging.attach import attached
from minifsdp.engine import collectives
from minifsdp.engine.exchange import exchange, groups_of
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.layout import Gradient, Layout, full_name
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.precision import tensors_in
from minifsdp.engine.root import RootState
from minifsdp.engine.shards import local_tensor
from minifsdp.engine.unit import Phase, Unit

# The records of this rank since the last agreement, in the order in which they were found; one for each unit.
_found: weakref.WeakKeyDictionary[Layout, str] = weakref.WeakKeyDictionary()


@contextmanager
def check_values() -> Iterator[None]:
    """Checks the values of all units inside the block."""
    with (
        attached(RootState, "begin_forward", _after_begin),
        attached(IterationState, "pre_forward", _after_gather),
        attached(IterationState, "hook_output", _after_module),
        attached(RootState, "end_forward", _after_forward),
        attached(FlatLayout, "take_gradient", _after_gradient),
        attached(PerParameterLayout, "take_gradient", _after_gradient),
        attached(
            IterationState,
            "end_backward",
            lambda _, iteration: _agree(iteration.units, "backward"),
        ),
    ):
        yield
    _found.clear()


# --- where values are created ---


def _after_begin(
    is_outermost: bool, root_state: RootState, caller: Unit | None = None
) -> None:
    if is_outermost:
        # Removes records of an iteration that was aborted.
        _forget(root_state.units)


def _after_gather(_: None, iteration: IterationState, unit: Unit) -> None:
    if unit.phase is Phase.FORWARD:
        infos = unit.layout.param_infos
        _record_first(
            unit.layout,
            [getattr(info.module, info.name) for info in infos],
            lambda number, counts: detail(
                "parameter-not-finite",
                name=full_name(unit.layout.name, infos[number].path),
                counts=counts,
            ),
        )


def _after_module(
    _: bool, iteration: IterationState, unit: Unit, inputs: Any, output: Any
) -> None:
    outputs = list(tensors_in(output))
    num = len(outputs)
    _record_first(
        unit.layout,
        outputs,
        lambda number, counts: detail(
            "output-not-finite",
            which=f", tensor {number + 1} of {num}," if num > 1 else "",
            unit=unit.name,
            counts=counts,
        ),
    )


def _after_gradient(
    gradient: Gradient | None, layout: Layout, *, with_unreduced: bool
) -> None:
    if gradient is None:
        return
    parts: Sequence[torch.Tensor] = gradient.parts
    infos = [layout.param_infos[number] for number in gradient.indices]
    if isinstance(layout, FlatLayout):
        # One flat tensor, with padding after the last parameter, and no numbers.
        infos = list(layout.param_infos)
        parts = parts[0].split(layout.sharding.split_sizes)[: len(infos)]
    _record_first(
        layout,
        parts,
        lambda number, counts: detail(
            "gradient-not-finite",
            name=full_name(layout.name, infos[number].path),
            counts=counts,
        ),
    )


@torch.no_grad()
def _record_first(
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    describe: Callable[[int, str], str],
) -> None:
    """Records the first tensor with values that are not finite, unless the unit has a record.

    Args:
        layout: the layout of the unit.
        tensors: the tensors to check.
        describe: returns the text for the number of a tensor and the counts of its values.
    """
    if layout in _found:
        return
    values = [_local_values(tensor) for tensor in tensors]
    sums = [
        value.sum()
        for value in values
        if value.is_floating_point() or value.is_complex()
    ]
    # One check for all of them, so that the CPU waits for an accelerator only once.
    if not sums or bool(sum(sums[1:], sums[0]).isfinite()):
        return
    for number, value in enumerate(values):
        num_nan = int(value.isnan().sum())
        num_inf = int(value.isinf().sum())
        # There may be none, because a sum of finite values can overflow.
        if num_nan or num_inf:
            counts = f"{num_nan} nan and {num_inf} inf among {value.numel()} values"
            _found[layout] = describe(number, counts)
            return


def _local_values(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values. Values of 8-bit floats are in float32, because torch has no sum of them."""
    values = local_tensor(tensor.detach())
    if values.is_floating_point() and values.itemsize == 1:
        return values.float()
    return values


# --- where ranks agree ---


def _after_forward(_: Any, root_state: RootState, output: Any) -> None:
    # In an evaluation without communication, ranks may reach this point at different times or not at all.
    if any(unit.phase is Phase.SUMMONED for unit in root_state.units):
        return
    if root_state.iteration.is_recorded or any(
        unit.plans[0].mesh.shard is not None for unit in root_state.units
    ):
        _agree(root_state.units, "forward", root_state.fail_forward)


def _agree(
    units: Sequence[Unit], what: str, clean_up: Callable[[], None] | None = None
) -> None:
    """Raises an error on every rank if any rank has a record. All ranks of the root must call it.

    Args:
        units: the units of the root.
        what: "forward" or "backward", for the message.
        clean_up: called before the error is raised.
    """
    mine = _forget(units)[:1]
    groups = groups_of(plan.mesh for unit in units for plan in unit.plans)
    if not units or not _any_rank(groups, bool(mine), units[0].layout.device):
        return
    places = [
        f"rank {rank}: {place}"
        for rank, found in exchange(groups, mine).items()
        for place in found
    ]
    if clean_up is not None:
        clean_up()
    raise RuntimeError(message("not-finite", what=what, places="\n".join(places)))


def _any_rank(groups: Sequence[Group], has_one: bool, device: torch.device) -> bool:
    # As in the order check, dispatch modes that count the collectives of training do not count this one.
    with _disable_current_modes():
        number = torch.full((1,), has_one, dtype=torch.int64, device=device)
        for group in groups:
            # The result of one group is part of the input to the next group.
            collectives.all_reduce(group, number).wait()
        return bool(number)


def _forget(units: Sequence[Unit]) -> list[str]:
    layouts = {unit.layout for unit in units}
    return [_found.pop(layout) for layout in list(_found) if layout in layouts]
