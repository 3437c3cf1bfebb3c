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

from minifsdp.engine import collectives, validation
from minifsdp.engine.backward_hooks import NOT_IN_BACKWARD, graph_task
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_params import assign_gradients
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message, warn
from minifsdp.engine.shards import local_tensor
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.build import FlatUnit

# The unsharded gradients in one flat tensor, and for each parameter, whether it has a gradient.
FullGradients = tuple[torch.Tensor, list[bool]]


@contextmanager
def summoned(
    units: Sequence[FlatUnit], *, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Generator[None]:
    """Registers unsharded parameters on the modules of ``units``. All ranks must enter it, even with ``rank0_only``.

    Raises:
        NotImplementedError: for ``writeback`` with ``rank0_only``, because the other ranks would keep their old shards;
            for ``with_grads`` with ``offload_to_cpu``, or if there are no gradients of individual parameters.
        UnitIsBusyError: if a unit is in forward or backward, or its full parameters are already summoned.
        RuntimeError: for ``with_grads``, if there are gradients that were never reduced.
    """
    if writeback and rank0_only:
        raise NotImplementedError(message("summon-write-rank0"))
    if with_grads and offload_to_cpu:
        raise NotImplementedError(message("summon-grads-offload"))
    if offload_to_cpu and not rank0_only:
        warn(message("summon-copies"))
    for unit in units:
        check_idle(unit)
        if with_grads and not unit.layout.use_orig_params:
            raise NotImplementedError(message("summon-no-grads", unit=unit.name))
    if with_grads:
        validation.check_reduced("summon_full_params(with_grads=True)", [unit.layout for unit in units])
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_one(unit, writeback, rank0_only, offload_to_cpu, with_grads))
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
def _one(unit: FlatUnit, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> Generator[None]:
    layout, mesh = unit.layout, unit.plan.mesh
    flat = all_gather_unit(unit)
    if offload_to_cpu and mesh.shard is not None:
        flat = outside_inference_mode(flat.cpu)()
    gradients = _all_gather_gradients(layout) if with_grads else None
    is_registered = mesh.is_first or not rank0_only
    # With `rank0_only`, a forward raises an error on the other ranks, because they have no unsharded parameters.
    unit.phase = Phase.SUMMONED
    validation.summoned.add(layout)
    try:
        with _full_params(unit, flat, gradients, writeback or mesh.shard is None) if is_registered else nullcontext():
            yield
    finally:
        unit.phase = Phase.IDLE
        if writeback:
            # The next forward or backward uses the new values.
            unit.reshard()
        validation.summoned.discard(layout)


@contextmanager
def _full_params(unit: FlatUnit, flat: torch.Tensor, gradients: FullGradients | None, keeps: bool) -> Generator[None]:
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
    full_params, _nodes = _use_full_params(unit, flat, gradients)
    try:
        yield
        # A parameter that was frozen at the beginning has no hook.
        if gradients is None and any(parameter.grad is not None for parameter in full_params):
            raise RuntimeError(message("backward-while-summoned", unit=unit.name))
    finally:
        # Afterwards, original parameters have their sharded values and gradients again.
        new_values, new_gradients = [p.data for p in full_params], [p.grad for p in full_params]
        replaced = layout.remove_full_params(full_params)
        if keeps:
            _copy_replaced(layout.views_of(flat), new_values)
            if layout.mesh.shard is not None:
                layout.overwrite(flat[layout.shard_range])
        if keeps and gradients is not None:
            _copy_replaced(layout.views_of(gradients[0]), new_gradients)
            present = [gradient is not None for gradient in new_gradients]
            layout.gradients.overwrite_reduced(gradients[0][layout.shard_range], present)
        if replaced:
            raise layout.replaced_error(replaced[0])


@outside_inference_mode
def _use_full_params(
    unit: FlatUnit, flat: torch.Tensor, gradients: FullGradients | None
) -> tuple[list[nn.Parameter], list[Any]]:
    """Registers unsharded parameters. Returns them, and their accumulation nodes with a hook on each."""
    full_params = unit.layout.use_full_params(flat)
    if gradients is not None:
        views = zip(unit.layout.views_of(gradients[0]), gradients[1], strict=True)
        # With ``keep_low_precision_grads``, gradients have another dtype than the parameters.
        assign_gradients(full_params, [view if is_there else None for view, is_there in views])
    nodes = [get_gradient_edge(parameter).node for parameter in full_params if parameter.requires_grad]
    for node in nodes:
        node.register_prehook(partial(_refuse_backward, unit.name))
    return full_params, nodes


def _refuse_backward(unit_name: str, gradients: Sequence[torch.Tensor | None]) -> None:
    # The node at the output of the root has a path to registered parameters, but sends no gradient (`requested.py`).
    if any(gradient is not None for gradient in gradients):
        raise RuntimeError(message("backward-while-summoned", unit=unit_name))


def _copy_replaced(views: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> None:
    """Copies values that have other memory into the views of the flat tensor."""
    for view, value in zip(views, values, strict=True):
        if value is None:
            continue
        target, source = local_tensor(view), local_tensor(value)
        # A transposed view has the same address.
        if target.data_ptr() != source.data_ptr() or target.stride() != source.stride():
            target.copy_(source.contiguous())


def all_gather_unit(unit: FlatUnit) -> torch.Tensor:
    """The unsharded flat tensor of a unit. All ranks of its shard group must call it, for the same unit."""
    return all_gather_values(unit.layout, name=unit.name)


@outside_inference_mode
def all_gather_values(layout: FlatLayout, shard: torch.Tensor | None = None, name: str | None = None) -> torch.Tensor:
    """The unsharded flat tensor in the stored dtype; the shard itself if nothing is sharded.

    All ranks of the shard group must call it.

    Args:
        layout: the unit's layout.
        shard: another tensor of the shard's size to all-gather; ``None`` for the shard.
        name: the name of the unit in the collective log.
    """
    shard, group = layout.local_values().data if shard is None else shard, layout.mesh.shard
    if group is None:
        return shard
    flat = torch.empty(layout.sharding.padded_numel, dtype=shard.dtype, device=layout.device)
    collectives.all_gather(group, flat, shard.to(layout.device), name).wait()
    return flat


def _all_gather_gradients(layout: FlatLayout) -> FullGradients:
    """The unsharded reduced gradients, and for each parameter whether any rank has a gradient.

    All ranks of the shard group must call it.
    """
    shard, present = layout.gradients.reduced()
    flat, group = all_gather_values(layout, shard), layout.mesh.shard
    if group is None:
        return flat, present
    votes = torch.tensor(present, dtype=torch.int32, device=layout.device)
    collectives.all_reduce(group, votes).wait()
    return flat, [vote > 0 for vote in votes.tolist()]
