"""Shards the model of a description with a *front end* (``api``).

``wrapped`` and ``fully_shard`` are minifsdp's. ``torch_wrapped`` and ``torch_fully_shard`` are torch's and show whether
torch also fails. ``careless`` has a defect that the judges must find.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spec_tests import subject
from spec_tests.harness import device, kept
from spec_tests.oracles.gathering import clean_name, wrap_units
from spec_tests.random_programs.description import Description, is_per_parameter
from spec_tests.random_programs.modules import Piece, Unit

LOW = torch.bfloat16
# By name: the arguments of `MixedPrecision`.
PRECISIONS: dict[str, dict[str, torch.dtype]] = {
    "full": {},
    "low": {"param_dtype": LOW},
    "low_summed_full": {"param_dtype": LOW, "reduce_dtype": torch.float32},
    "full_summed_low": {"reduce_dtype": LOW},
    # For a model in float64. The reference does not round, and the comparison has a tolerance.
    "single": {"param_dtype": torch.float32},
}
# `reshard_after_forward` for a strategy; for others, all units but the root are resharded.
RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "_HYBRID_SHARD_ZERO2": False}

# The ranks that shard, or all of them.
Group = dist.ProcessGroup | None


def _wrapped(library: Any, d: Description, model: Piece, group: Group, **others: Any) -> nn.Module:
    def strategy(name: str) -> Any:
        return library.ShardingStrategy[name or d.strategy]

    options: dict[str, Any] = {
        "process_group": _groups(d, group) if d.is_hybrid and not d.by_mesh else group,
        "sharding_strategy": strategy(""),
        "cpu_offload": library.CPUOffload(offload_params=True) if d.offload else None,
        "backward_prefetch": library.BackwardPrefetch[d.backward_prefetch] if d.backward_prefetch else None,
        "mixed_precision": library.MixedPrecision(**PRECISIONS[d.precision]) if PRECISIONS[d.precision] else None,
        "device_id": device(),
        "forward_prefetch": d.forward_prefetch,
        "limit_all_gathers": d.limits,
        "use_orig_params": d.originals,
        **others,
    }
    if d.is_hybrid and d.by_mesh:
        options.update(process_group=None, device_mesh=_mesh(d, group))
    if d.precision == "single":
        # A submodule that is called alone gets an input in float64.
        options["mixed_precision"] = library.MixedPrecision(**PRECISIONS[d.precision], cast_forward_inputs=True)
    fsdp = library.FullyShardedDataParallel

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        is_unit = isinstance(module, Piece) and module.node.unit
        return {"sharding_strategy": strategy(module.node.strategy)} if is_unit else False

    if d.by_policy:
        policy = library.wrap.ModuleWrapPolicy({Unit}) if d.by_policy == "class" else library.wrap.CustomPolicy(choose)
        return fsdp(model, auto_wrap_policy=policy, **options)
    return wrap_units(model, (Unit,), lambda m: fsdp(m, **{**options, "sharding_strategy": strategy(m.node.strategy)}))


def _groups(d: Description, group: Group) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's (shard group, replicate group). All ranks must call it in the same order."""

    def make() -> Any:
        if group is not None and d.num_replicas in (1, d.num_ranks):
            alone = [dist.new_group([rank]) for rank in range(d.num_ranks)][dist.get_rank()]
            return (group, alone) if d.num_replicas == 1 else (alone, group)
        size = d.num_ranks // d.num_replicas
        rows = [list(range(start, start + size)) for start in range(0, d.num_ranks, size)]
        row, _ = dist.new_subgroups_by_enumeration(rows)
        column, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*rows, strict=True)])
        return row, column

    return make() if group is not None else kept(f"random programs {d.num_ranks} {d.num_replicas}", make)


def _mesh(d: Description, group: Group) -> Any:
    if not d.is_hybrid:
        if group is not None:
            return DeviceMesh.from_group(group, device().type)
        return dist.init_device_mesh(device().type, (d.num_ranks,))
    row, column = _groups(d, group)
    table = torch.arange(d.num_ranks).view(d.num_replicas, -1)
    return DeviceMesh.from_group([column, row], device().type, mesh=table, mesh_dim_names=("replicate", "shard"))


def _fully_shard(library: Any, d: Description, model: Piece, group: Group, **others: Any) -> nn.Module:
    low = PRECISIONS[d.precision]
    options: dict[str, Any] = {
        "reshard_after_forward": d.among or d.frees or RESHARDS.get(d.strategy),
        "mp_policy": library.MixedPrecisionPolicy(**low),
        "offload_policy": library.CPUOffloadPolicy(pin_memory=d.pins) if d.offload else library.OffloadPolicy(),
        "mesh": _mesh(d, group),
        **others,
    }
    return wrap_units(model, (Unit,), lambda module: library.fully_shard(module, **options))


def _be_careless(wrapped: nn.Module) -> None:
    """Adds a defect: a unit around an embedding gets half of its gradient if it is called twice."""
    for module in wrapped.modules():
        unit = getattr(module, "_unit", None)
        inside = getattr(module, "_fsdp_wrapped_module", None)
        if unit is not None and isinstance(inside, Piece) and (inside.node.kind, inside.node.times) == ("embedding", 2):
            unit.plans[0].scaling = dataclasses.replace(unit.plans[0].scaling, after=2 * unit.plans[0].scaling.after)


def sharded(description: Description, model: Piece, group: Group = None, **others: Any) -> nn.Module:
    """Shards the plain model. Every rank must call it. The sharded model uses the clock of the plain model.

    Args:
        description, model: the program and its plain model.
        group: the ranks that shard, if not all.
        others: options of the front end that are not part of a description.
    """
    full = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"} if description.full_in_eval else {}
    with warnings.catch_warnings(), mock.patch.dict(os.environ, full):
        # Expected: frozen next to trained parameters, a root without parameters, and torch's deprecated strategies.
        warnings.simplefilter("ignore")
        library = torch.distributed.fsdp if description.api.startswith("torch_") else subject
        shard = _fully_shard if is_per_parameter(description) else _wrapped
        wrapped = shard(library, description, model, group, **others)
    if description.api == "careless":
        _be_careless(wrapped)
    _lay_hook(description, wrapped, group)
    return wrapped


def _lay_hook(d: Description, model: Any, group: Group) -> None:
    if d.hook == "accumulated":
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.div_(2))
    elif d.hook in _HOOKS and hasattr(model, "register_comm_hook"):
        model.register_comm_hook(group, _HOOKS[d.hook])
    elif d.hook in _HOOKS:
        units = [unit for unit in model.modules() if hasattr(unit, "set_all_reduce_hook")]
        stream: Any = None
        if d.hook == "async" and not d.is_hybrid:
            stream = torch.get_device_module(device()).Stream(device())
        for unit in units:
            if d.hook == "communication":
                unit.set_all_reduce_hook(lambda reduced: reduced.div_(2))
            else:
                unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=stream)


# Its name since torch 2.13, in which the old name warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _summed(group: Group, gradient: Tensor, local_shard: Tensor | None = None, **options: Any) -> Any:
    if local_shard is None:
        return dist.all_reduce(gradient, group=group, **options)
    return _reduce_scatter(local_shard, gradient, group=group, **options)


def _combine_and_halve(group: Group, gradient: Tensor, local_shard: Tensor | None = None) -> None:
    _summed(group, gradient, local_shard)
    (gradient if local_shard is None else local_shard).div_(2 * dist.get_world_size(group))


def _in_place(group: Group, gradient: Tensor, local_shard: Tensor | None = None) -> None:
    _summed(group, gradient.div_(dist.get_world_size(group)), local_shard)


def _async(group: Group, gradient: Tensor, local_shard: Tensor | None = None) -> None:
    _summed(group, gradient, local_shard, async_op=True).wait()


def _low(group: Group, gradient: Tensor, local_shard: Tensor | None = None) -> None:
    low = gradient.to(LOW)
    low_shard = None if local_shard is None else torch.empty_like(local_shard, dtype=LOW)
    _summed(group, low, low_shard)
    (gradient if local_shard is None else local_shard).copy_(low if low_shard is None else low_shard)


_HOOKS = {"communication": _combine_and_halve, "in_place": _in_place, "plain": _summed, "async": _async, "low": _low}


def parameters_here(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters, by the plain name of the parameter, or of the unit if it has a flat one."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter
