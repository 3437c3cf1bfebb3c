"""The user's hands on full parameters: ``summon_full_params`` and ``apply``.

Outside of forward and backward the full parameters are nowhere. Now and then a user wants them: to look at a weight,
to initialise by module type, to evaluate a formula. For the time of a ``with`` block each unit is gathered into a *row*
of its own, in the stored dtype, and its modules show ordinary ``nn.Parameter`` objects that are views of the row. The
flat parameter steps aside, and the wrappers leave their prefixes out of names, so that inside the block the model looks
as if it had never been wrapped.

What happens to changes? Each rank writes back *its own shard* of what it sees. If all ranks made the same change, all
of it persists; if each made a different one, the result is a patchwork by shard. Two ranks, a weight of four elements,
rank 0 fills it with 0 and rank 1 with 1::

    rank 0 sees [0 0 0 0], keeps [0 0]        afterwards everybody gathers [0 0 1 1]
    rank 1 sees [1 1 1 1], keeps     [1 1]

The row is a temporary tensor and not the memory that forward uses: that one may have another dtype, and a backward may
still be waiting for what is in it.

*In torch:* ``_unshard_param_utils.py``. A forward inside the block runs there and breaks on leaving; here it raises.

Spec: SUMMON-01 to SUMMON-20, APPLY-01 to APPLY-04, NAMES-02, NAMES-03, MP-18.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from minifsdp.engine import optimizer_watch
from minifsdp.engine.messages import message, warn
from minifsdp.engine.root import Root
from minifsdp.engine.summoned import Summoned, full_gradient_row, full_row
from minifsdp.engine.triggers import NOT_IN_BACKWARD, graph_task
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import FlatUnit


def check_summon_options(*, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> None:
    """Whether the options go together. Nothing is communicated.

    Raises:
        NotImplementedError: ``writeback`` with ``rank0_only``: the other ranks would keep old shards of a new model;
            or ``with_grads`` with ``offload_to_cpu``.
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
    """Full parameters on the modules of ``units``. All ranks must enter and leave it, also with ``rank0_only``.

    Raises:
        UnitIsBusyError: a unit is in forward or backward, or its full parameters have been summoned already.
        NotImplementedError: ``with_grads``, and gradients of single parameters are not kept apart.
        RuntimeError: ``with_grads``, and there are gradients that were never reduced.
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
    """A unit is in another phase than it must be. Programs written for torch's FSDP look for any of the three kinds."""


def check_not_running(tree: Root) -> None:
    """Whether no forward or backward of the whole tree is going on.

    Raises:
        UnitIsBusyError: one is.
    """
    if tree.is_busy:
        raise UnitIsBusyError(message("summon-while-running", idle=Phase.IDLE))


def check_idle(unit: FlatUnit) -> None:
    """Whether the unit is idle, and its full parameters are not summoned.

    Raises:
        UnitIsBusyError: it is not.
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
    # A rank that sees nothing, because only the first one does, must not compute in the meantime either.
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
    """Whether no gradients were computed for parameters that are about to be given back.

    The wrapper refuses a forward, but a part of the model can be called past it.
    """
    shown = (slot.module._parameters.get(slot.name) for owned in unit.layout.parameters for slot in owned.slots)
    if any(parameter is not None and parameter.grad is not None for parameter in shown):
        raise RuntimeError(message("backward-while-summoned", unit=unit.name))
