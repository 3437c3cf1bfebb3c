"""The deprecated functions for optimizer states, implemented with the two current ones.

In older torch versions, there was one function for each type of state dict: full or sharded, for all ranks or from the
first rank. Scripts from 2022 call them, so they still work, each with one ``FutureWarning`` that names the current one.

====================================  ========================================  =======================================
old                                   current                                   communication
====================================  ========================================  =======================================
``full_optim_state_dict``             ``optim_state_dict``, full                an all-gather per state of each unit
``sharded_optim_state_dict``          ``optim_state_dict``, sharded             the same
``shard_full_optim_state_dict``       ``optim_state_dict_to_load``, full        nothing
``scatter_full_optim_state_dict``     the same with ``rank0_only``              to each rank its own shards
``flatten_sharded_optim_state_dict``  ``optim_state_dict_to_load``, sharded     an all-gather for each tensor
``rekey_optim_state_dict``            (none)                                    nothing
====================================  ========================================  =======================================

Two of them differ only in cost. Worked example, 1 GB of states on 8 ranks of one machine: ``shard_...`` needs the dict
in 8 processes, 8 GB of memory, and sends nothing. ``scatter_...`` needs it in one process and sends 7/8 GB.

An even older argument is ``optim_input``, the parameters or groups that the optimizer was constructed with. It is only
used to number the parameters, and only if the optimizer itself is not given.

*In torch:* the same functions, also with warnings. Not supported here: results that alias the optimizer's tensors.

Spec: OSD-FULL, OSD-SHARD, OSD-SCAT, OSD-SHD, OSD-FLAT, OSD-REKEY, LEGACY-12.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from minifsdp.checkpoint import optim_state
from minifsdp.checkpoint.codec import NamedOptimizer, parameters_of, regrouped
from minifsdp.checkpoint.state_dict_options import Form, OptimStateKeyType
from minifsdp.checks import optimizer_states
from minifsdp.checks.arguments import MODULE, OPTIMIZER, require, warn_renamed
from minifsdp.engine.messages import message, warn

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter]
WRAPPER = "FullyShardedDataParallel"


def save(
    name: str,
    model: nn.Module,
    optim: Optimizer,
    form: Form,
    group: Any,
    optim_input: OptimInput | None = None,
) -> dict[str, Any]:
    """The state by original names, for the older method ``name``."""
    require(MODULE, name, model=model)
    require(OPTIMIZER, name, optim=optim)
    warn_renamed(f"{WRAPPER}.{name}", f"{WRAPPER}.optim_state_dict")
    _warn_of(optim_input)
    source = NamedOptimizer(model, optim, form)
    return optim_state.save(source, optim.state_dict(), group)


def load(
    name: str,
    given: Any,
    model: nn.Module,
    optim_input: OptimInput | None,
    optim: Optimizer | None,
    form: Form,
    *,
    communicates: bool = True,
) -> dict[str, Any]:
    """A dict for the optimizer that `target` returns, for the older method ``name``."""
    loading = target(name, model, optim_input, optim, form)
    warn_renamed(f"{WRAPPER}.{name}", f"{WRAPPER}.optim_state_dict_to_load")
    return optim_state.load(loading, given, communicates=communicates)


def in_todays_order(
    model: Any, optim: Any, optim_state_dict: Any
) -> tuple[Any, Any, Any]:
    """Accepts the argument order in the examples of torch 2.1, which contradicts torch's own signature."""
    if isinstance(model, Mapping) and isinstance(optim, nn.Module):
        name = "optim_state_dict_to_load"
        warn_renamed(
            f"{name}(optim_state_dict, model, optim)",
            f"{name}(model, optim, optim_state_dict)",
        )
        return optim, optim_state_dict, model
    return model, optim, optim_state_dict


def _warn_of(optim_input: OptimInput | None) -> None:
    if optim_input is not None:
        warn(message("optim-input"), FutureWarning)


def target(
    name: str,
    model: nn.Module,
    optim_input: OptimInput | None,
    optim: Optimizer | None,
    form: Form,
) -> NamedOptimizer:
    """The given optimizer, or a new one of ``optim_input``, or a new one of all parameters in one group.

    The older method ``name`` calls it.
    """
    require(MODULE, name, model=model)
    _warn_of(optim_input)
    if optim is not None and optim_input is not None:
        raise ValueError(message("optim-input-and-optim"))
    if optim is None:
        optim = Optimizer(
            model.parameters() if optim_input is None else optim_input, {}
        )
    return NamedOptimizer(model, optim, form, is_lenient=True)


def rekey(
    given: dict[str, Any], key_type: OptimStateKeyType, target: NamedOptimizer
) -> dict[str, Any]:
    """A full dict with names or IDs as keys.

    Raises:
        AssertionError: if the key type is unknown.
        ValueError: if a key of the dict has no counterpart.
    """
    if not isinstance(key_type, OptimStateKeyType):
        raise AssertionError(
            message(
                "key-type",
                members=", ".join(map(str, OptimStateKeyType)),
                key_type=key_type,
            )
        )
    to_names = key_type is OptimStateKeyType.PARAM_NAME
    keys = [*given["state"], *parameters_of(given["param_groups"])]
    if all(isinstance(key, str) is to_names for key in keys):
        return given
    if problems := optimizer_states.unknown_parameters(target):
        raise ValueError(message("optimizer-parameters", problem=problems[0]))
    numbered = [
        (number, name)
        for owner, number in target.keys.items()
        for name in target.of[owner]
    ]
    table: dict[Any, Any] = (
        dict(numbered) if to_names else {name: number for number, name in numbered}
    )
    if unknown := [key for key in keys if key not in table]:
        raise ValueError(
            message("rekey-mismatch", unknown=unknown[:5], known=list(table)[:5])
        )
    # An optimizer numbers its parameters in order.
    in_order: Any = list if to_names else sorted
    groups = [
        regrouped(
            group,
            in_order(table[key] for key in group["params"]),
            group.get("param_names"),
        )
        for group in given["param_groups"]
    ]
    return {
        **given,
        "state": {table[key]: of for key, of in given["state"].items()},
        "param_groups": groups,
    }
