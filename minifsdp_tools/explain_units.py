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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from minifsdp.cases.smaller_mesh import mesh_after_forward
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_params import FLAT_NAME
from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.layout import Layout, ParamInfo, full_name, owned_parameters
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import rank_of_this_process
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.shards import shard_shape
from minifsdp.engine.unit import Unit, modules_of_unit
from minifsdp.fsdp1.options import BackwardPrefetch
from minifsdp.fsdp1.wrapper import Wrapper, clean_name, is_wrapper
from minifsdp.fsdp2.fsdp_state import state_of, states_in
from minifsdp.fsdp2.module import FSDPModule
from minifsdp_tools.explain_records import ParameterSummary, UnitSummary
from minifsdp_tools.formulas import padded_per_parameter

# The names of modules in the model.
Names = dict[nn.Module, str]


def units_of(model: nn.Module, num_shards: int | None = None) -> list[UnitSummary]:
    """All units, including the planned one, in the order of the model, but with the root's own first.

    Args:
        model: sharded with either API, partly sharded, or not sharded.
        num_shards: ranks for a planned unit that is the only unit; by default all.
    """
    names: Names = {module: clean_name(name) for name, module in model.named_modules()}
    units = [
        _existing(
            wrapper._unit,
            names[wrapper],
            names,
            is_root=wrapper is model,
            # The root stays unsharded until its backward, with any strategy.
            stays=wrapper is model,
            buffers=wrapper.mixed_precision.buffer_dtype,
        )
        for wrapper in Wrapper.fsdp_modules(model)
        if wrapper._unit is not None
    ]
    root = state_of(model)
    units += [
        _existing(
            state.unit,
            "" if state is root else name,
            names,
            is_root=state is root,
            # If not set, the first forward decides: the root stays unsharded.
            stays=state is root and state.reshard_after_forward is None,
        )
        for name, state in states_in(model)
        if state.unit is not None
    ]
    if not is_sharded(model):
        units += _planned(model, names, units[0] if units else None, num_shards)
    return sorted(units, key=lambda unit: not unit.is_root)


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` itself is sharded; not whether it contains a sharded module."""
    return is_wrapper(module) or state_of(module) is not None


def type_of(module: nn.Module) -> str:
    """The class of a module as the user has written it, without a wrapper or the class of ``fully_shard``."""
    if isinstance(module, Wrapper):
        module = module.module
    made = type(module)
    return (made.__bases__[1] if made.__bases__[0] is FSDPModule else made).__name__


def left_out(model: nn.Module, units: Iterable[UnitSummary]) -> dict[str, nn.Parameter]:
    """Parameters that belong to none of the ``units``, by name."""
    # Compares names, because the registered tensor changes. A flat parameter has no name in its unit.
    owned = {
        name
        for unit in units
        for parameter in unit.parameters
        for name in (parameter.name, *parameter.ties)
    }
    places = [
        (path, *place)
        for path, module in model.named_modules()
        for place in module._parameters.items()
    ]
    named = {
        clean_name(full_name(path, name)): p
        for path, name, p in places
        if name != FLAT_NAME and p is not None
    }
    return {name: parameter for name, parameter in named.items() if name not in owned}


def choices_of(model: nn.Module) -> dict[str, Any]:
    """The fields of a `Job` that concern the whole model and not single units."""
    units = _sharded(model)
    groups = [
        unit.plans[0].mesh.shard for unit in units if unit.layout.device.type == "cpu"
    ]
    return {
        # For other models, the defaults of `fully_shard`, unless prefetching was set manually.
        "forward_prefetch": isinstance(model, Wrapper) and model.forward_prefetch,
        "backward_prefetch": not isinstance(model, Wrapper)
        or model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE,
        # Whether some reduction overlaps with the next unit's computation; `set_reduction_overlap` can change it.
        "overlaps": not is_sharded(model)
        or any(unit.plans[0].overlaps for unit in units),
        # Whether shards are sent between CPUs by ``minifsdp_gloo``; not for a planned unit.
        "by_messages": any(
            group is not None and group.transport is not None for group in groups
        ),
        # Buffers may have several dtypes, so they are counted in bytes.
        "buffers": _buffer_bytes(model),
        "buffer": torch.uint8,
    }


def _sharded(model: nn.Module) -> list[Unit]:
    """All units of a model, of both APIs."""
    units = [wrapper._unit for wrapper in Wrapper.fsdp_modules(model)] + [
        state.unit for _, state in states_in(model)
    ]
    return [unit for unit in units if unit is not None]


def _buffer_bytes(model: nn.Module) -> int:
    """Bytes of all buffers, in the dtypes that they have from the first forward on. They are not sharded."""
    chosen = {
        m: w.mixed_precision.buffer_dtype
        for w in Wrapper.fsdp_modules(model)
        for _, m in w._own_modules()
    }
    num_bytes = {}
    for module in model.modules():
        for buffer in module.buffers(recurse=False):
            dtype = chosen.get(module) if buffer.is_floating_point() else None
            num_bytes[buffer] = buffer.numel() * (dtype or buffer.dtype).itemsize
    return sum(num_bytes.values())


# ---- units that exist -----------------------------------------------------------------------------------------------


def _existing(
    unit: Unit,
    name: str,
    names: Names,
    is_root: bool,
    stays: bool,
    buffers: torch.dtype | None = None,
) -> UnitSummary:
    """Describes a unit.

    Args:
        unit: a unit of either API.
        name: the name of its module in the model.
        names: the names of all modules.
        is_root: whether it is the unit of the model itself.
        stays: whether it stays unsharded after forward because it is the root.
        buffers: the dtype of its buffers, if one was chosen.
    """
    layout = unit.layout
    mesh = unit.plans[0].mesh
    smaller = mesh_after_forward(unit)
    modules = [place.module for info in layout.param_infos for place in info.places]
    return UnitSummary(
        name=name,
        type=type_of(unit.modules[0]),
        parameters=tuple(_parameters(layout, names)),
        ranks=_ranks(mesh.shard),
        num_replicas=mesh.num_ranks // mesh.num_shards,
        per_parameter=isinstance(layout, PerParameterLayout),
        frees=unit.policy.reshard_after_forward and not stays,
        reshards_to=None if smaller is None else smaller.num_shards,
        compute=layout.dtype,
        reduce=unit.layout.precision.reduce or layout.dtype,
        offloads=layout.offloads,
        gathered_bytes=layout.num_bytes,
        low_batch_norms=_low_batch_norms(modules, layout.dtype, buffers, names),
        is_root=is_root,
    )


def _parameters(layout: Layout, names: Names) -> Iterator[ParameterSummary]:
    if isinstance(layout, PerParameterLayout):
        for param in layout.params:
            ranks = _ranks(param.mesh_groups.shard)
            yield ParameterSummary(
                *_places(param.info, names),
                tuple(param.shape),
                param.dim,
                param.local_shard.dtype,
                param.parameter.requires_grad,
                _elements_by_rank(param.shape, param.dim, ranks),
            )
    elif isinstance(layout, FlatLayout):
        trained_flags = [
            parameter.requires_grad for parameter in layout.local_parameters
        ]
        if not layout.use_orig_params:
            # One flat parameter for all.
            trained_flags *= len(layout.param_infos)
        dtype = layout.registered.shard.dtype
        numbers = _elements_in_flat(layout.sharding, _ranks(layout.mesh.shard))
        each = zip(
            layout.param_infos, layout.local_shapes, trained_flags, numbers, strict=True
        )
        for info, shape, trained, owned in each:
            yield ParameterSummary(
                *_places(info, names), tuple(shape), 0, dtype, trained, owned
            )


def _ranks(group: Group | None) -> tuple[int, ...]:
    return (rank_of_this_process(),) if group is None else group.ranks


def _places(info: ParamInfo, names: Names) -> tuple[str, tuple[str, ...]]:
    """The name of a parameter, and the names of its ties."""
    first, *ties = [full_name(names[place.module], place.name) for place in info.places]
    return first, tuple(ties)


def _elements_in_flat(
    sharding: FlatSharding, ranks: Sequence[int]
) -> list[dict[int, int]]:
    """The number of elements that each rank stores, for each parameter in a flat parameter."""
    ranges = {rank: sharding.param_ranges(index) for index, rank in enumerate(ranks)}
    return [
        {
            rank: parts[number].stop - parts[number].start
            for rank, parts in ranges.items()
        }
        for number in range(len(sharding.numels))
    ]


def _elements_by_rank(
    shape: torch.Size, dim: int, ranks: Sequence[int]
) -> dict[int, int]:
    """The number of elements that each rank stores, for a parameter that is sharded separately."""
    return {
        rank: shard_shape(shape, dim, len(ranks), index).numel()
        for index, rank in enumerate(ranks)
    }


def _low_batch_norms(
    modules: Iterable[nn.Module],
    compute: torch.dtype,
    buffers: torch.dtype | None,
    names: Names,
) -> tuple[str, ...]:
    means = {
        module: module.running_mean
        for module in modules
        if isinstance(module, _BatchNorm)
    }
    statistics = {
        module: compute if mean is None else buffers or mean.dtype
        for module, mean in means.items()
    }
    return tuple(
        names[module]
        for module, dtype in statistics.items()
        if min(compute.itemsize, dtype.itemsize) < 4
    )


# ---- the planned unit -----------------------------------------------------------------------------------------------


def _planned(
    model: nn.Module, names: Names, like: UnitSummary | None, num_shards: int | None
) -> Iterator[UnitSummary]:
    """The remaining parameters as the unit that sharding the whole model would make; nothing if there are none.

    Args:
        model: a module that is not sharded itself.
        names: the names of all modules.
        like: an existing unit with the choices for the planned one.
        num_shards: see `units_of`.
    """
    owners = modules_of_unit([model], is_sharded)
    if not (left := owned_parameters(owners, set())):
        return
    if like is None:
        num_ranks = num_shards or (
            dist.get_world_size() if dist.is_initialized() else 1
        )
        stored = max(left, key=lambda parameter: parameter.numel()).dtype
        like = UnitSummary("", "", (), tuple(range(num_ranks)), stored, stored)
    shapes = [tuple(parameter.shape) or (1,) for parameter in left]
    if like.per_parameter:
        numel = padded_per_parameter(shapes, len(like.ranks))
        numbers = [
            _elements_by_rank(torch.Size(shape), 0, like.ranks) for shape in shapes
        ]
    else:
        sharding = FlatSharding(tuple(map(prod, shapes)), len(like.ranks))
        numel = sharding.padded_numel
        numbers = _elements_in_flat(sharding, like.ranks)
    parameters = [
        ParameterSummary(
            *_places(info, names),
            shape,
            0,
            parameter.dtype,
            parameter.requires_grad,
            owned,
        )
        for (parameter, info), shape, owned in zip(
            left.items(), shapes, numbers, strict=True
        )
    ]
    yield replace(
        like,
        name="",
        type=type_of(model),
        parameters=tuple(parameters),
        frees=False,
        reshards_to=None,
        gathered_bytes=numel * like.compute.itemsize,
        low_batch_norms=_low_batch_norms(
            (module for _, module in owners), like.compute, None, names
        ),
        is_root=True,
        is_planned=True,
    )
