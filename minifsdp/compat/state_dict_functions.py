"""The functions of ``torch.distributed.checkpoint.state_dict``, for models with wrappers.

Torch's functions convert the model's state correctly for a wrapper. For the optimizer's state they call static methods
of torch's own wrapper class, which read its internals. So the functions of this module convert the optimizer's state
with ``checkpoint/``, and leave the rest to torch's functions. Only the import line of a program changes::

    from minifsdp import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)

Worked example, Adam and a unit with ``weight`` (2 x 3) on two ranks, for some options::

    no options                      {"state": {"weight": {"exp_avg": this rank's row}}, "param_groups": [...]}
    full_state_dict                 {"state": {"weight": {"exp_avg": 2 x 3}}, "param_groups": [...]}
    full_state_dict, cpu_offload    the same on rank 0, on the CPU; {} on rank 1
    flatten_optimizer_state_dict    {"state.weight.exp_avg": ..., "param_groups.weight.lr": 0.1, ...}

An optimizer that has not taken a step has no states. ``dcp.load`` needs tensors to read into, so the functions first
create states with a step of gradients that are zero, as torch's functions do.

With tensor parallelism, values of a full dict are plain tensors, and rank 0 means its first rank, too.

With ``broadcast_from_rank0``, each rank keeps its rows of a value that arrives, and releases the value. The rows are
then loaded as those of a sharded dict. So a rank never stores the full dict.

``torch.compile(module)`` adds ``_orig_mod`` to the names of parameters. These functions remove it, so that a model that
is not compiled can load the dict.

*In torch:* ``torch/distributed/checkpoint/state_dict.py``, with the same signatures.

Spec: PROG-63, PROG-64, PROG-92, PROG-93, PROG-97, SCALE-04.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

# Imported as objects: a program may replace the names in torch's module by the functions below.
from torch.distributed.checkpoint.state_dict import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict as get_in_current_mode,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict as get_without_wrappers,
)
from torch.distributed.checkpoint.state_dict import (
    set_model_state_dict as set_without_broadcast,
)
from torch.distributed.checkpoint.state_dict import (
    set_optimizer_state_dict as set_without_wrappers,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from minifsdp.checkpoint import optim_state
from minifsdp.checkpoint.codec import (
    NamedOptimizer,
    UnitCodec,
    dotted,
    parameters_of,
    tensor_parallel_groups,
)
from minifsdp.checkpoint.loading import reshard_all
from minifsdp.checkpoint.state_dict_options import Form, StateDictType, named_wrappers
from minifsdp.checkpoint.tensors import is_sharded, value_of_first_rank
from minifsdp.checks import agreement
from minifsdp.engine.exchange import groups_of
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.messages import message, warn
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.wrapper import Wrapper, units_in
from minifsdp.fsdp2.fsdp_state import states_in

__all__ = [
    "DictValueType",
    "FQNS_T",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = Optimizer | Iterable[Optimizer]

# Torch's function supports wrappers, see ``wrapper_names.py``.
get_model_state_dict = outside_inference_mode(get_in_current_mode)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's state and the state of its optimizers. Every rank must call it."""
    # This function compares the models of the ranks, before torch's function sends values.
    states = get_optimizer_state_dict(
        model, optimizers, submodules=submodules, options=options
    )
    return get_model_state_dict(model, submodules=submodules, options=options), states


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[Any, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Loads the model's state and the state of its optimizers. Every rank must call it.

    Returns:
        The missing and the unexpected keys of the model's state.
    """
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: dict[Any, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Loads the model's state. Every rank must call it.

    Args:
        model: the model.
        model_state_dict: values by name, or dicts by submodule.
        options: see torch's function.

    Returns:
        The missing and the unexpected keys.
    """
    if any(isinstance(key, nn.Module) for key in model_state_dict):
        warn(message("states-of-submodules", argument="modules as keys"), FutureWarning)
        starts = _prefixes(model)
        model_state_dict = {
            starts[module] + name: value
            for module, entries in model_state_dict.items()
            if module in starts
            for name, value in entries.items()
        }
    if options is not None and options.broadcast_from_rank0:
        _agree(model, "set_model_state_dict()", sends=True)
        if options.full_state_dict and (wrappers := Wrapper.fsdp_modules(model)):
            model_state_dict, has_rows = _received(
                model, model_state_dict, wrappers[0]._mesh
            )
            options = replace(
                options, broadcast_from_rank0=False, full_state_dict=not has_rows
            )
    # Torch's function adds entries to the dict.
    return set_without_broadcast(model, copy.copy(model_state_dict), options=options)


def _received(
    model: nn.Module, given: Mapping[str, Any], mesh: MeshGroups
) -> tuple[dict[str, Any], bool]:
    """The first rank's dict of full values, as this rank's rows of the parameters in units. Every rank must call it.

    Returns:
        The dict, and whether it contains rows.
    """
    wrappers = named_wrappers(model)
    units = [
        UnitCodec(wrapper, dotted(path), _uncompiled)
        for path, wrapper in wrappers
        if wrapper._unit is not None
    ]
    # Modules whose full parameters are summoned load full values.
    of_unit = {
        key: unit
        for unit in units
        if unit.unit.phase is not Phase.SUMMONED
        for key in unit.keys
    }
    groups = [*tensor_parallel_groups(units), mesh.replicate, mesh.shard]

    def receive(key: str) -> Any:
        value = value_of_first_rank(given.get(key), groups)
        return value if key not in of_unit else of_unit[key].rows(key, value)

    # Each full value is released before the next one is received, so no rank stores the model.
    received = {key: receive(key) for key in value_of_first_rank(list(given), groups)}
    return received, any(map(is_sharded, received.values()))


@outside_inference_mode
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of all optimizers of a model by original names. Every rank must call it."""
    options = options or StateDictOptions()
    if not Wrapper.fsdp_modules(model):
        _agree(model, "get_optimizer_state_dict()", sends=options.full_state_dict)
        reshard_all(model)
        return get_without_wrappers(
            model, optimizers, submodules=submodules, options=options
        )
    listed = _listed(optimizers)
    merged: dict[str, Any] = {"state": {}, "param_groups": []} if listed else {}
    for optimizer in listed:
        if not optimizer.state:
            # Torch's function creates the states of any optimizer. Its result is not used.
            get_without_wrappers(
                nn.ParameterList(parameters_of(optimizer.param_groups)), optimizer
            )
        source = NamedOptimizer(model, optimizer, _form(options), clean=_uncompiled)
        saved = optim_state.save(source, optimizer.state_dict())
        # Only the first rank may get a result, but all ranks convert the states of all optimizers.
        if saved:
            merged["state"].update(saved["state"])
            merged["param_groups"].extend(saved["param_groups"])
    if options.cpu_offload and not merged.get("param_groups"):
        return {}
    return (
        _flattened(merged)
        if merged and options.flatten_optimizer_state_dict
        else merged
    )


@outside_inference_mode
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Loads the state of all optimizers of a model. Every rank must call it.

    Raises:
        StateDictMismatchError: on all ranks, before any change of this optimizer, if the dict does not fit.
    """
    if not Wrapper.fsdp_modules(model):
        _agree(
            model,
            "set_optimizer_state_dict()",
            sends=options is not None and options.broadcast_from_rank0,
        )
        reshard_all(model)
        set_without_wrappers(model, optimizers, optim_state_dict, options=options)
        return
    listed = _listed(optimizers)
    form = _form(options or StateDictOptions())
    for optimizer in listed:
        target = NamedOptimizer(model, optimizer, form, clean=_uncompiled)
        given = optim_state_dict or {}
        if given and "state" not in given:
            given = _unflattened(
                given,
                [
                    target.originals_of(group["params"])
                    for group in optimizer.param_groups
                ],
            )
        if given and len(listed) > 1:
            given = _part(given, set(target.originals_of(target.keys)))
        optimizer.load_state_dict(optim_state.load(target, given))


def _agree(model: nn.Module, call: str, *, sends: bool) -> None:
    """Refuses a call that sends values, if the ranks issued different collectives before it."""
    found = [*(state.unit for _, state in states_in(model)), *units_in(model)]
    meshes = [unit.plans[0].mesh for unit in found if sends and unit is not None]
    if meshes:
        agreement.monitored_barrier(groups_of(meshes), call)


def _listed(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _form(options: StateDictOptions) -> Form:
    if not options.full_state_dict:
        return Form(StateDictType.SHARDED_STATE_DICT, offload=options.cpu_offload)
    first_only = options.cpu_offload or options.broadcast_from_rank0
    return Form(offload=options.cpu_offload, first_only=first_only, is_complete=True)


def _prefixes(model: nn.Module) -> dict[nn.Module, str]:
    """For each module of a model, the prefix of its names in the results of torch's functions."""
    outer = "module." if isinstance(model, DistributedDataParallel) else ""
    return {
        module: _uncompiled(dotted(path)).removeprefix(outer)
        for path, module in model.named_modules()
    }


def _uncompiled(name: str) -> str:
    """A name without the attribute that ``torch.compile(module)`` adds, as in the results of torch's functions."""
    return name.replace("_orig_mod.", "")


def _part(given: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The part of a dict of several optimizers that belongs to the optimizer of the parameters ``names``."""
    groups = [
        group for group in given["param_groups"] if names.intersection(group["params"])
    ]
    return {
        "state": {name: of for name, of in given["state"].items() if name in names},
        "param_groups": groups,
    }


def _flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """A dict with one level. The settings of a group are stored for each of its parameters."""
    states = {
        f"state.{name}.{key}": value
        for name, of in given["state"].items()
        for key, value in of.items()
    }
    settings = {
        f"param_groups.{name}.{key}": value
        for group in given["param_groups"]
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return states | settings


def _unflattened(flat: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """The reverse of `_flattened`, for an optimizer with ``groups`` of parameters. Names of states have no dot."""
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in flat.items():
        path, _, entry = key.rpartition(".")
        section, _, name = path.partition(".")
        found[section].setdefault(name, {})[entry] = value
    names = {name for group in groups for name in group}
    state = {name: of for name, of in found["state"].items() if name in names}
    return {
        "state": state,
        "param_groups": [
            {**found["param_groups"].get(n[0], {}), "params": n} for n in groups if n
        ],
    }
