"""Reads the units of a model, existing or planned, into the records of ``explain_records.py``.

A sharded model stores all facts about its units in their layouts, plans and policies. Nothing is communicated and
nothing is changed, and the lazy root is not initialized. So this works before the first forward, on one rank alone, and
with a model on the meta device.

Worked example, ``fully_shard(block)`` for two blocks of 1000 elements, and not yet for the model around them, which has
100 more elements::

    blocks.0    1000      exists
    blocks.1    1000      exists
    (root)       100      planned: the unit that `fully_shard(model)` would make, sharded and cast like the others

So a plain model is one planned unit of all ranks. Once the outermost module is sharded, there is no planned unit: the
remaining parameters were ignored on purpose.

*In torch:* nothing comparable.

Spec: EXPLAIN-01, EXPLAIN-02, EXPLAIN-05.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.layout import ParamInfo, full_name, owned_parameters
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import rank_of_this_process
from minifsdp.engine.shards import shard_shape
from minifsdp.engine.unit import Unit, modules_of_unit
from minifsdp.fsdp1.options import BackwardPrefetch
from minifsdp.fsdp1.wrapper import Wrapper, clean_name, is_wrapper
from minifsdp.fsdp2.fsdp_state import state_of, states_in
from minifsdp.fsdp2.module import FSDPModule
from minifsdp.tools.explain_records import ParameterSummary, UnitSummary
from minifsdp.tools.formulas import padded_per_parameter, padded_row

# The names of modules in the model.
Names = dict[nn.Module, str]


def units_of(model: nn.Module, num_shards: int | None = None) -> list[UnitSummary]:
    """All units, including the planned one, in the order of the model, but with the root's own first.

    Args:
        model: sharded with either API, partly sharded, or not sharded.
        num_shards: ranks for a planned unit that is the only unit; by default all.
    """
    names: Names = {module: clean_name(name) for name, module in model.named_modules()}
    units = [*_flat_units(model, names), *_units_in_place(model, names)]
    if not is_sharded(model):
        units[:0] = _planned(model, names, units[0] if units else None, num_shards)
    return sorted(units, key=lambda unit: not unit.is_root)


def is_sharded(model: nn.Module) -> bool:
    """Whether the outermost module itself is sharded."""
    return is_wrapper(model) or state_of(model) is not None


def left_out(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that belong to no unit, with their names."""
    layouts = [unit.layout for unit in _sharded(model)]
    # Compares places, because the registered tensor changes. The place of a flat parameter is not among them.
    places = {
        (slot.module, slot.name) for layout in layouts for owned in layout.parameters for slot in owned.attributes
    }
    flat = {parameter for layout in layouts for parameter in layout.local_parameters()}
    return [
        (clean_name(full_name(prefix, name)), parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and (module, name) not in places and parameter not in flat
    ]


def type_of(module: nn.Module) -> str:
    """The class of a module as the user has written it, without a wrapper or the class of ``fully_shard``."""
    if isinstance(module, Wrapper):
        module = module.module
    made = type(module)
    return (made.__bases__[-1] if made.__bases__[0] is FSDPModule else made).__name__


def prefetches(model: nn.Module) -> tuple[bool, bool]:
    """Whether forward, and whether backward, prefetches the next unit before this one has computed."""
    if isinstance(model, Wrapper):
        return model.forward_prefetch, model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    # The defaults of `fully_shard`, unless prefetching was set manually.
    return False, True


def sends_by_itself(model: nn.Module) -> bool:
    """Whether shards are sent between CPUs by ``engine/gloo.py``; not for a planned unit."""
    groups = [unit.plan.mesh.shard for unit in _sharded(model) if unit.layout.device.type == "cpu"]
    return any(group is not None and group.transport is not None for group in groups)


def overlaps(model: nn.Module) -> bool:
    """Whether some reduction overlaps with the next unit's computation; `set_reduction_overlap` can change it."""
    return not is_sharded(model) or any(unit.plan.overlaps for unit in _sharded(model))


def _sharded(model: nn.Module) -> list[Unit]:
    """All units of a model, of both APIs."""
    units = [wrapper._unit for wrapper in Wrapper.fsdp_modules(model)] + [state.unit for _, state in states_in(model)]
    return [unit for unit in units if unit is not None]


def buffer_bytes(model: nn.Module) -> int:
    """Bytes of all buffers, in the dtypes that they have from the first forward on. They are not sharded."""
    chosen = {
        module: wrapper.mixed_precision.buffer_dtype
        for wrapper in Wrapper.fsdp_modules(model)
        for _, module in wrapper._own_modules()
    }
    buffers = {buffer: chosen.get(module) for module in model.modules() for buffer in module._buffers.values()}
    return sum(
        buffer.numel() * ((dtype if buffer.is_floating_point() else None) or buffer.dtype).itemsize
        for buffer, dtype in buffers.items()
        if buffer is not None
    )


# ---- the two APIs ---------------------------------------------------------------------------------------------------


def _flat_units(model: nn.Module, names: Names) -> Iterator[UnitSummary]:
    for wrapper in Wrapper.fsdp_modules(model):
        unit = wrapper._unit
        if unit is None:
            continue
        layout, is_root = unit.layout, wrapper is model
        trained = [parameter.requires_grad for parameter in layout.local_parameters()]
        if not layout.use_orig_params:
            # One flat parameter for all.
            trained *= len(layout.parameters)
        shapes, numbers = layout.local_shapes, _elements_in_flat(layout.sharding)
        dtype, ranks = layout.registered.shard.dtype, _ranks(layout.mesh.shard)
        parameters = [
            ParameterSummary(
                *_places(owned.attributes, names),
                tuple(shape),
                0,
                dtype,
                is_trained,
                dict(zip(ranks, each, strict=True)),
            )
            for owned, shape, is_trained, each in zip(layout.parameters, shapes, trained, numbers, strict=True)
        ]
        # The root stays unsharded until its backward, with any strategy.
        frees = unit.policy.reshard_after_forward and not is_root
        found = _summary(unit, parameters, names, wrapper.mixed_precision.buffer_dtype)
        yield replace(found, name=names[wrapper], frees=frees, is_root=is_root)


def _units_in_place(model: nn.Module, names: Names) -> Iterator[UnitSummary]:
    for name, state in states_in(model):
        unit = state.unit
        if unit is None:
            continue
        parameters = []
        for param in unit.layout.params:
            owned = _elements_by_rank(param.shape, param.dim, _ranks(param.mesh_groups.shard))
            trained, dtype = param.parameter.requires_grad, param.local_shard.dtype
            places = _places(param.info.attributes, names)
            parameters.append(ParameterSummary(*places, tuple(param.shape), param.dim, dtype, trained, owned))
        is_root = state is state_of(model)
        # If not set, the first forward decides: the root stays unsharded.
        frees = unit.policy.reshard_after_forward and not (is_root and state.reshard_after_forward is None)
        yield replace(_summary(unit, parameters, names), name="" if is_root else name, frees=frees, is_root=is_root)


def _ranks(group: Group | None) -> tuple[int, ...]:
    return (rank_of_this_process(),) if group is None else group.ranks


def _places(slots: Sequence[ParamInfo], names: Names) -> tuple[str, tuple[str, ...]]:
    """The name of a parameter, and the names of its ties."""
    first, *ties = [full_name(names[slot.module], slot.name) for slot in slots]
    return first, tuple(ties)


def _elements_in_flat(sharding: FlatSharding) -> list[tuple[int, ...]]:
    """The number of elements that each rank stores, for each parameter in a flat parameter."""
    ranges = [sharding.param_ranges(index) for index in range(sharding.num_shards)]
    return [tuple(part.stop - part.start for part in parts) for parts in zip(*ranges, strict=True)]


def _elements_by_rank(shape: torch.Size, dim: int, ranks: Sequence[int]) -> dict[int, int]:
    """The number of elements that each rank stores, for a parameter that is sharded separately."""
    return {rank: shard_shape(shape, dim, len(ranks), index).numel() for index, rank in enumerate(ranks)}


def _summary(
    unit: Unit, parameters: Sequence[ParameterSummary], names: Names, buffers: torch.dtype | None = None
) -> UnitSummary:
    """The fields that are read in the same way for both APIs."""
    layout, mesh, post_forward_mesh = unit.layout, unit.plan.mesh, unit.policy.post_forward_mesh
    inside = [slot.module for owned in layout.parameters for slot in owned.attributes]
    return UnitSummary(
        name="",
        type=type_of(unit.module),
        parameters=tuple(parameters),
        ranks=_ranks(mesh.shard),
        num_replicas=mesh.num_ranks // mesh.num_shards,
        per_parameter=not isinstance(layout, FlatLayout),
        frees=unit.policy.reshard_after_forward,
        reshards_to=None if post_forward_mesh is None else post_forward_mesh.begin.args[0].size,  # type: ignore[attr-defined]
        compute=layout.dtype,
        reduce=unit.precision.reduce or layout.dtype,
        offloads=layout.offloads,
        gathered_bytes=layout.num_bytes,
        low_batch_norms=_low_batch_norms(inside, layout.dtype, buffers, names),
        is_root=False,
    )


def _low_batch_norms(
    modules: Iterable[nn.Module], compute: torch.dtype, buffers: torch.dtype | None, names: Names
) -> tuple[str, ...]:
    low = []
    for module in dict.fromkeys(modules):
        if isinstance(module, _BatchNorm):
            mean = module.running_mean
            statistics = compute if mean is None else buffers or mean.dtype
            if min(compute.itemsize, statistics.itemsize) < 4:
                low.append(names[module])
    return tuple(low)


# ---- the planned unit -----------------------------------------------------------------------------------------------


def _planned(model: nn.Module, names: Names, like: UnitSummary | None, num_shards: int | None) -> Iterator[UnitSummary]:
    """The remaining parameters as the unit that sharding the whole model would make; nothing if there are none."""
    owners = modules_of_unit([model], lambda module: is_wrapper(module) or state_of(module) is not None)
    left = owned_parameters(owners, set())
    if not left:
        return
    all_ranks = num_shards or (dist.get_world_size() if dist.is_initialized() else 1)
    ranks = like.ranks if like else tuple(range(all_ranks))
    is_flat = like is not None and not like.per_parameter
    shapes = [tuple(parameter.shape) or (1,) for parameter in left]
    stored = max(left, key=lambda parameter: parameter.numel()).dtype
    compute = like.compute if like else stored
    numel = (padded_row if is_flat else padded_per_parameter)(shapes, len(ranks))
    parameters = tuple(
        ParameterSummary(*_places(owned.attributes, names), shape, 0, parameter.dtype, parameter.requires_grad, each)
        for (parameter, owned), shape, each in zip(left.items(), shapes, _cut(shapes, ranks, is_flat), strict=True)
    )
    yield UnitSummary(
        name="",
        type=type_of(model),
        parameters=parameters,
        ranks=ranks,
        num_replicas=like.num_replicas if like else 1,
        per_parameter=not is_flat,
        frees=False,
        reshards_to=None,
        compute=compute,
        reduce=like.reduce if like else stored,
        offloads=like is not None and like.offloads,
        gathered_bytes=numel * compute.itemsize,
        low_batch_norms=_low_batch_norms((module for _, module in owners), compute, None, names),
        is_root=True,
        is_planned=True,
    )


def _cut(shapes: Sequence[tuple[int, ...]], ranks: Sequence[int], is_flat: bool) -> list[dict[int, int]]:
    """The number of elements that each rank will store, for parameters that are not sharded yet."""
    if not is_flat:
        return [_elements_by_rank(torch.Size(shape), 0, ranks) for shape in shapes]
    numbers = _elements_in_flat(FlatSharding(tuple(map(prod, shapes)), len(ranks)))
    return [dict(zip(ranks, each, strict=True)) for each in numbers]
