"""Access to unsharded parameters: ``summon_full_params`` and ``apply``.

Outside of forward and backward, no rank holds the unsharded parameters. Users sometimes need them, for example to read
a weight, to initialize by module type, or to evaluate a formula. Inside the ``with`` block, each unit is all-gathered
into its own temporary buffer in the stored dtype, and its modules have ordinary ``nn.Parameter`` objects that are views
of this buffer. The flat parameter is unregistered and names have no wrapper prefixes, so inside the block the model
looks as if it was never wrapped.

Changes persist as follows: each rank writes back *its own shard* of the values that it has. If all ranks make the same
change, the whole change persists. If each rank makes a different change, the result is a mix of shards. Two ranks, a
weight of four elements, rank 0 fills it with 0 and rank 1 with 1::

    rank 0 has [0 0 0 0], keeps [0 0]         later all-gathers return [0 0 1 1] on all ranks
    rank 1 has [1 1 1 1], keeps     [1 1]

The buffer is separate from the memory that forward uses, which may have another dtype and may still be needed by a
backward.

*In torch:* ``_unshard_param_utils.py``. A forward inside the block runs there and fails on exit; here it raises.

Spec: SUMMON-01 to SUMMON-20, APPLY-01 to APPLY-04, NAMES-02, NAMES-03, MP-18.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from minifsdp.engine import optimizer_watch
from minifsdp.engine.backward_hooks import NOT_IN_BACKWARD, graph_task
from minifsdp.engine.messages import message, warn
from minifsdp.engine.root import Root
from minifsdp.engine.summoned import Summoned, full_gradient_row, full_row
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import FlatUnit


def check_summon_options(*, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> None:
    """Checks that the options can be combined. Nothing is communicated.

    Raises:
        NotImplementedError: for ``writeback`` with ``rank0_only``, because the other ranks would keep their old shards,
            and for ``with_grads`` with ``offload_to_cpu``.
    """
    if writeback and rank0_only:
        raise NotImplementedError(message("summon-write-rank0"))
    if with_grads and offload_to_cpu:
        raise NotImplementedError(message("summon-grads-offload"))
    if offload_to_cpu and not rank0_only:
        warn(message("summon-copies"))


@contextmanager
def summoned(
    units: Sequence[FlatUnit], *, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Generator[None]:
    """Registers unsharded parameters on the modules of ``units``. All ranks must enter it, even with ``rank0_only``.

    Raises:
        UnitIsBusyError: if a unit is in forward or backward, or its full parameters are already summoned.
        NotImplementedError: for ``with_grads``, if there are no gradients of individual parameters.
        RuntimeError: for ``with_grads``, if there are gradients that were never reduced.
    """
    for unit in units:
        check_idle(unit)
        if with_grads and unit.layout.hides_originals:
            raise NotImplementedError(message("summon-no-grads", unit=unit.name))
    if with_grads:
        optimizer_watch.check_reduced("summon_full_params(with_grads=True)", [unit.layout for unit in units])
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_one(unit, writeback, rank0_only, offload_to_cpu, with_grads))
        yield


class UnitIsBusyError(RuntimeError, AssertionError, ValueError):
    """A unit is in the wrong phase. Programs written for torch's FSDP catch any of the three base classes."""


def check_not_running(tree: Root) -> None:
    """Checks that no forward or backward of the tree is running.

    Raises:
        UnitIsBusyError: if one is running.
    """
    if tree.is_busy:
        raise UnitIsBusyError(message("summon-while-running", idle=Phase.IDLE))


def check_idle(unit: FlatUnit) -> None:
    """Checks that the unit is idle and its full parameters are not summoned.

    Raises:
        UnitIsBusyError: if it is not idle.
    """
    where = f"unit {unit.name!r} is expected to be in states [{Phase.IDLE}] but"
    if unit.phase is Phase.SUMMONED:
        raise UnitIsBusyError(message("summon-twice", where=where, phase=unit.phase))
    if unit.phase is not Phase.IDLE or graph_task() != NOT_IN_BACKWARD:
        raise UnitIsBusyError(message("summon-unit-runs", where=where))


@contextmanager
def _one(unit: FlatUnit, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> Generator[None]:
    layout, mesh = unit.layout, unit.plan.mesh
    row = full_row(layout)
    gradients = full_gradient_row(layout) if with_grads else None
    # With `rank0_only`, the other ranks must not compute either, although they have no unsharded parameters.
    sees = mesh.is_first or not rank0_only
    unit.phase = Phase.SUMMONED
    shown = row.cpu() if offload_to_cpu and mesh.shard is not None else row
    summoned = Summoned(layout, shown, gradients) if sees else None
    optimizer_watch.summoned.add(layout)
    try:
        yield
        if summoned is not None and not with_grads:
            _check_no_gradients(unit)
    finally:
        unit.phase = Phase.IDLE
        optimizer_watch.summoned.discard(layout)
        if summoned is not None:
            summoned.hide(keep_changes=writeback or mesh.shard is None)


def _check_no_gradients(unit: FlatUnit) -> None:
    """Checks that the temporary parameters have no gradients before they are removed.

    The wrapper's forward raises an error, but users can still call inner modules directly.
    """
    shown = (slot.module._parameters.get(slot.name) for owned in unit.layout.parameters for slot in owned.attributes)
    if any(parameter is not None and parameter.grad is not None for parameter in shown):
        raise RuntimeError(message("backward-while-summoned", unit=unit.name))
