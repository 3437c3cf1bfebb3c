"""Access to unsharded parameters: ``summon_full_params`` and ``apply``.

Outside of forward and backward, no rank holds the unsharded parameters. Users sometimes need them, for example to read
a weight, to initialize by module type, or to evaluate a formula. Inside the ``with`` block, each unit is all-gathered
into its own temporary buffer in the stored dtype, and its modules have ordinary ``nn.Parameter`` objects that are views
of this buffer. The flat parameter is unregistered and names have no wrapper prefixes, so inside the block the model
looks as if it was never wrapped.

At the end of the block, each rank writes back *its own shard* of its values. If all ranks make the same change, the
whole change persists. If each rank makes a different change, the result is a mix of shards. In this example, rank 0
fills a weight of four elements with 0, and rank 1 fills it with 1::

    rank 0 has [0 0 0 0], keeps [0 0]         later all-gathers return [0 0 1 1] on all ranks
    rank 1 has [1 1 1 1], keeps     [1 1]

The buffer is separate from the memory that forward uses, which may have another dtype and may still be needed by a
backward. An in-place change of a parameter changes the buffer. But users may also *replace* values: ``p.data = ...``
gives a parameter its own memory. Then the address of the parameter differs, and its values are copied into the buffer
before the write-back.

A forward inside the block computes with these parameters, in the stored dtype and without communication. So it returns
what the plain model returns. Its backward raises an error, because nothing would reduce the gradients. Autograd would
accumulate them in the full parameters. A hook on the accumulation node of each full parameter raises the error. This
node lives as long as a graph that uses the parameter, so the error is also raised after the end of the block.

*In torch:* ``_unshard_param_utils.py``, ``_unshard_params`` and ``_writeback_orig_params``. A forward inside the block
returns the same output with original parameters, and raises an assertion with flat ones. A backward inside the block
leaves unreduced gradients in some cases.

Spec: SUMMON-01 to SUMMON-20, PROG-01 to PROG-03, APPLY-01 to APPLY-04, NAMES-02, NAMES-03, MP-18.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minifsdp.checks import ownership
from minifsdp.engine import collectives
from minifsdp.engine.backward_hooks import (
    NOT_IN_BACKWARD,
    graph_task,
    register_pre_backward_hook,
)
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.layout import replaced_error
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message, warn
from minifsdp.engine.shards import local_tensor
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import FlatUnit


@contextmanager
def summoned(
    units: Sequence[FlatUnit],
    *,
    writeback: bool,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    gradients_of: Any = None,
) -> Generator[None]:
    """Registers unsharded parameters on the modules of ``units``. All ranks must enter it, even with ``rank0_only``.

    Args:
        units: the units.
        writeback, rank0_only, offload_to_cpu: as for ``summon_full_params``.
        gradients_of: `SummonedGradients`, to give the parameters their gradients; ``None`` for no gradients.

    Raises:
        NotImplementedError: for ``writeback`` with ``rank0_only``, because the other ranks would keep their old shards;
            if there are no gradients to give.
        UnitIsBusyError: if a unit is in forward or backward, or its full parameters are already summoned.
    """
    if writeback and rank0_only:
        raise NotImplementedError(message("summon-write-rank0"))
    for unit in units:
        check_idle(unit)
    if gradients_of is not None:
        gradients_of.check(units, offload_to_cpu=offload_to_cpu)
    if offload_to_cpu and not rank0_only:
        warn(message("summon-copies"))
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(
                _one(unit, writeback, rank0_only, offload_to_cpu, gradients_of)
            )
        yield


class UnitIsBusyError(RuntimeError, AssertionError, ValueError):
    """A unit is in the wrong phase. Programs for torch's FSDP catch any of the three base classes."""


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
def _one(
    unit: FlatUnit,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    gradients_of: Any,
) -> Generator[None]:
    layout = unit.layout
    is_sharded = layout.mesh.shard is not None
    flat = all_gather_unit(unit)
    if offload_to_cpu and is_sharded:
        flat = outside_inference_mode(flat.cpu)()
    gradients = None if gradients_of is None else gradients_of(unit)
    # With `rank0_only`, a forward raises an error on the other ranks, because they have no unsharded parameters.
    unit.phase = Phase.SUMMONED
    ownership.summoned.add(layout)
    try:
        with (
            _full_params(unit, flat, gradients, writeback or not is_sharded)
            if layout.mesh.is_first or not rank0_only
            else nullcontext()
        ):
            yield
    finally:
        unit.phase = Phase.IDLE
        if writeback:
            # The next forward or backward uses the new values.
            unit.reshard()
        ownership.summoned.discard(layout)


@contextmanager
def _full_params(
    unit: FlatUnit, flat: torch.Tensor, gradients: Any, keeps: bool
) -> Generator[None]:
    """Registers unsharded parameters on the modules of a unit inside the context.

    Args:
        unit: the unit.
        flat: the unsharded flat tensor.
        gradients: for ``.grad`` of the parameters; ``None`` for no gradients.
        keeps: whether to write this rank's changes to the shard at the end.

    Raises:
        RuntimeError: if a module has another parameter at the end, or a parameter has a gradient and ``gradients`` is
            ``None``.
    """
    layout = unit.layout
    # `_nodes` exist only while something refers to them.
    full_params, _nodes = _use_full_params(unit, flat)
    if gradients is not None:
        gradients.assign(full_params)
    try:
        yield
        # A parameter that was frozen at the beginning has no hook.
        if gradients is None and any(
            parameter.grad is not None for parameter in full_params
        ):
            raise RuntimeError(message("backward-while-summoned", unit=unit.name))
    finally:
        # Afterwards, original parameters have their sharded values and gradients again.
        new_values = [parameter.data for parameter in full_params]
        new_gradients = [parameter.grad for parameter in full_params]
        replaced = layout.remove_full_params(full_params)
        if keeps:
            copy_replaced(layout.views_of(flat), new_values)
            if layout.mesh.shard is not None:
                layout.overwrite_local(flat[layout.shard_range])
            if gradients is not None:
                gradients.write_back(new_gradients)
        if replaced:
            raise replaced_error(layout, replaced[0])


@outside_inference_mode
def _use_full_params(
    unit: FlatUnit, flat: torch.Tensor
) -> tuple[list[nn.Parameter], list[Any]]:
    """Registers unsharded parameters. Returns them, and their accumulation nodes with a hook on each."""
    full_params = unit.layout.use_full_params(flat)
    nodes = [
        get_gradient_edge(parameter).node
        for parameter in full_params
        if parameter.requires_grad
    ]
    for node in nodes:
        node.register_prehook(partial(_refuse_backward, unit.name))
    return full_params, nodes


def _refuse_backward(unit_name: str, gradients: Sequence[torch.Tensor | None]) -> None:
    # The node at the output of the root has a path to registered parameters, but sends no gradient, see
    # ``cases/requested_parameters.py``.
    if any(gradient is not None for gradient in gradients):
        raise RuntimeError(message("backward-while-summoned", unit=unit_name))


def leave_forward(
    unit: FlatUnit, iteration: IterationState, inputs: Any, output: Any
) -> Any:
    """Called directly after the module of ``unit`` has run. Returns the output to pass to the caller."""
    if unit.phase is Phase.SUMMONED:
        if torch.is_grad_enabled():
            register_pre_backward_hook(output, partial(_check_still_summoned, unit))
    elif unit.phase is not Phase.PRE_BACKWARD:
        output, is_recorded = iteration.hook_output(unit, inputs, output)
        iteration.leave_forward(unit, is_recorded=is_recorded)
    return output


def _check_still_summoned(unit: FlatUnit, *_: Any) -> None:
    """Called in a backward of a forward with full parameters, which exist only inside ``summon_full_params``."""
    if unit.phase is not Phase.SUMMONED:
        raise RuntimeError(message("backward-while-summoned", unit=unit.name))


def copy_replaced(
    views: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]
) -> None:
    """Copies values that have other memory into the views of the flat tensor."""
    for view, value in zip(views, values, strict=True):
        target = local_tensor(view)
        source = target if value is None else local_tensor(value)
        # A transposed view has the same address.
        if target.data_ptr() != source.data_ptr() or target.stride() != source.stride():
            target.copy_(source.contiguous())


@outside_inference_mode
def all_gather_unit(unit: FlatUnit, shard: torch.Tensor | None = None) -> torch.Tensor:
    """The unsharded flat tensor of a unit in the stored dtype; the shard itself if nothing is sharded.

    All ranks of its shard group must call it, for the same unit.

    Args:
        unit: the unit.
        shard: another tensor of the shard's size to all-gather; ``None`` for the shard.
    """
    layout = unit.layout
    group = layout.mesh.shard
    shard = layout.local_values().data if shard is None else shard
    if group is None:
        return shard
    flat = torch.empty(
        layout.sharding.padded_numel, dtype=shard.dtype, device=layout.device
    )
    collectives.all_gather(group, flat, shard.to(layout.device), unit.name).wait()
    return flat
