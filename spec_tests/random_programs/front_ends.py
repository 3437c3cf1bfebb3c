"""Shards the model of a description with a *front end* (``api``).

``wrapped`` and ``fully_shard`` are minifsdp's. ``torch_wrapped`` and ``torch_fully_shard`` are torch's and show whether
torch also fails. ``careless`` has a defect that the judges must find.
"""

from __future__ import annotations

import dataclasses
import functools
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
from spec_tests.random_programs.description import COMMUNICATION_HOOKS, Description
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


def _wrapped(library: Any, d: Description, model: Piece, group: Group) -> nn.Module:
    options: dict[str, Any] = {
        "process_group": _groups(d, group) if d.is_hybrid and not d.by_mesh else group,
        "cpu_offload": library.CPUOffload(offload_params=True) if d.offload else None,
        "backward_prefetch": library.BackwardPrefetch[d.backward_prefetch] if d.backward_prefetch else None,
        "mixed_precision": library.MixedPrecision(**PRECISIONS[d.precision]) if PRECISIONS[d.precision] else None,
        "device_id": device(),
        "forward_prefetch": d.forward_prefetch,
        "limit_all_gathers": d.limits,
        "use_orig_params": d.originals,
    }
    if d.is_hybrid and d.by_mesh:
        options.update(process_group=None, device_mesh=_mesh(d, group))
    if d.precision == "single":
        # A submodule that is called alone gets an input in float64.
        options["mixed_precision"] = library.MixedPrecision(**PRECISIONS[d.precision], cast_forward_inputs=True)

    def unit(module: Piece) -> nn.Module:
        strategy = library.ShardingStrategy[module.node.strategy or d.strategy]
        return library.FullyShardedDataParallel(module, sharding_strategy=strategy, **options)

    return wrap_units(model, (Unit,), unit)


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
        return DeviceMesh.from_group(group or dist.group.WORLD, device().type)
    row, column = _groups(d, group)
    table = torch.arange(d.num_ranks).view(d.num_replicas, -1)
    return DeviceMesh.from_group([column, row], device().type, mesh=table, mesh_dim_names=("replicate", "shard"))


def _fully_shard(library: Any, d: Description, model: Piece, group: Group) -> nn.Module:
    low = PRECISIONS[d.precision]
    options: dict[str, Any] = {
        "reshard_after_forward": d.among or d.frees or RESHARDS.get(d.strategy),
        "mp_policy": library.MixedPrecisionPolicy(**low),
        "offload_policy": library.CPUOffloadPolicy(pin_memory=d.pins) if d.offload else library.OffloadPolicy(),
        "mesh": _mesh(d, group),
    }
    return wrap_units(model, (Unit,), lambda module: library.fully_shard(module, **options))


def _be_careless(wrapped: nn.Module) -> None:
    """Adds a defect: a unit around an embedding gets half of its gradient if it is called twice."""
    for module in wrapped.modules():
        unit = getattr(module, "_unit", None)
        inside = getattr(module, "_fsdp_wrapped_module", None)
        if unit is not None and isinstance(inside, Piece) and (inside.node.kind, inside.node.times) == ("embedding", 2):
            unit.plans[0].scaling = dataclasses.replace(unit.plans[0].scaling, after=2 * unit.plans[0].scaling.after)


def sharded(description: Description, model: Piece, group: Group = None) -> nn.Module:
    """Shards the plain model. Every rank must call it. The sharded model uses the clock of the plain model.

    Args:
        description, model: the program and its plain model.
        group: the ranks that shard, if not all.
    """
    full = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"} if description.full_in_eval else {}
    with warnings.catch_warnings(), mock.patch.dict(os.environ, full):
        # Expected: frozen next to trained parameters, a root without parameters, and torch's deprecated strategies.
        warnings.simplefilter("ignore")
        library = torch.distributed.fsdp if description.api.startswith("torch_") else subject
        shard = _fully_shard if description.is_per_parameter else _wrapped
        wrapped = shard(library, description, model, group)
    if description.api == "careless":
        _be_careless(wrapped)
    _lay_hook(description, wrapped, group)
    return wrapped


def _lay_hook(d: Description, model: Any, group: Group) -> None:
    if d.hook == "accumulated":
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.div_(2))
    elif d.hook in COMMUNICATION_HOOKS and hasattr(model, "register_comm_hook"):
        model.register_comm_hook(group, functools.partial(_reduce, d.hook))
    elif d.hook in COMMUNICATION_HOOKS:
        options: dict[str, Any] = {}
        if d.hook == "async" and not d.is_hybrid:
            options = {"stream": torch.get_device_module(device()).Stream(device())}
        for unit in model.modules():
            if hasattr(unit, "set_all_reduce_hook"):
                unit.set_all_reduce_hook(lambda reduced: reduced.div_(2), **options)


# Its name since torch 2.13, in which the old name warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _reduce(kind: str, group: Group, gradient: Tensor, local_shard: Tensor | None = None) -> None:
    """A communication hook of the wrapper; `Description.hook` lists the kinds."""
    num_ranks, is_async = dist.get_world_size(group), kind == "async"
    if kind == "in_place":
        gradient.div_(num_ranks)
    result = gradient if local_shard is None else local_shard
    sent, received = gradient, result
    if kind == "low":
        sent = gradient.to(LOW)
        received = sent if local_shard is None else torch.empty_like(result, dtype=LOW)
    if local_shard is None:
        work = dist.all_reduce(received, group=group, async_op=is_async)
    else:
        work = _reduce_scatter(received, sent, group=group, async_op=is_async)
    if is_async:
        work.wait()
    if kind == "low":
        result.copy_(received)
    elif kind == "communication":
        result.div_(2 * num_ranks)


def parameters_here(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters, by the plain name of the parameter, or of the unit if it has a flat one."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter
