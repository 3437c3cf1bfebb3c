"""``FullyShardedDataParallel``: the wrapper, with all methods that users call.

The class has its constructor and the methods for states. It inherits the others. ``fsdp1/wrapper.py`` contains the base
class `Wrapper`, with the unit, the forward, the root state, and the names, attributes and items of the module.

=========================================  ===========================================================
``fsdp1/training.py``                      ``no_sync``, ``summon_full_params``, ``clip_grad_norm_``, hooks
``checkpoint/``                            state dicts of the model and the optimizer
``compat/optim_state_legacy.py``           optimizer state dicts with the API up to torch 2.0
``compat/wrapper_names.py``                private names that frameworks read
``compat/legacy.py``                       keywords of torch 1.11
``arguments.py``                           argument type checks
=========================================  ===========================================================

Worked example: ``FullyShardedDataParallel(model).state_dict()`` calls ``checkpoint.state_dict.save``, which walks the
model, all-gathers one unit after the other, and returns the unsharded parameters.

Checkpoint scripts import the constants ``FLAT_PARAM``, ``FSDP_PREFIX`` and ``FSDP_WRAPPED_MODULE`` to clean names.

*In torch:* one class of 2167 lines, at the same import path.

Spec: CTOR-01, LEGACY-01.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.fsdp._common_utils import _FSDPState
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    LOW_PRECISION_HOOKS,
    HandleTrainingState,
    TrainingState,
)
from torch.optim import Optimizer

from minifsdp import api
from minifsdp.api import *  # noqa: F403
from minifsdp.cases import parts_of_units
from minifsdp.checkpoint import (
    optim_state,
    state_dict,
    state_dict_load,
)
from minifsdp.checkpoint import state_dict_options as options
from minifsdp.checkpoint.codec import NamedOptimizer
from minifsdp.checkpoint.state_dict_options import (
    Form,
    OptimStateKeyType,
    StateDictType,
)
from minifsdp.checks import arguments, ownership
from minifsdp.checks.arguments import OPTIMIZER, Kind, is_a, or_none, require
from minifsdp.compat import optim_state_legacy
from minifsdp.compat.legacy import policy_by_either_name
from minifsdp.compat.wrapper_names import TorchNames
from minifsdp.engine.compiler import step_over_this_package
from minifsdp.engine.flat_params import FLAT_NAME as FLAT_PARAM
from minifsdp.engine.messages import message, warn
from minifsdp.engine.schedule import BackwardPrefetch
from minifsdp.fsdp1 import build
from minifsdp.fsdp1.build import HYBRID_SHARDING_STRATEGIES
from minifsdp.fsdp1.options import (
    CPUOffload,
    MixedPrecision,
    ProcessGroupType,
    ShardingStrategy,
)
from minifsdp.fsdp1.training import TrainingMethods
from minifsdp.fsdp1.wrap import CustomPolicy, ModuleWrapPolicy, auto_wrap
from minifsdp.fsdp1.wrapper import PREFIX as FSDP_PREFIX
from minifsdp.fsdp1.wrapper import WRAPPED as FSDP_WRAPPED_MODULE
from minifsdp.fsdp1.wrapper import is_wrapper

__all__ = [
    "CustomPolicy",
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "FlatParameter",
    "FullyShardedDataParallel",
    "HYBRID_SHARDING_STRATEGIES",
    "HandleTrainingState",
    "LOW_PRECISION_HOOKS",
    "ModuleWrapPolicy",
    "OptimStateKeyType",
    "ProcessGroupType",
    "TrainingState",
]
__all__ += api.__all__

PREFETCH = Kind(
    "one of BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST or None",
    or_none(is_a(BackwardPrefetch)),
)
OFFLOAD = Kind("a CPUOffload or None", or_none(is_a(CPUOffload)))


class FullyShardedDataParallel(TrainingMethods, TorchNames, _FSDPState):  # type: ignore[misc, override]
    """Shards a module's parameters, gradients and optimizer state over the ranks of a group.

    Every rank of the group must construct it, with modules of the same structure and in the same order.

    Args:
        module: the module to wrap.
        process_group: the group to shard over; for a hybrid strategy the pair (shard group, replicate group).
        sharding_strategy: which state is sharded, see `ShardingStrategy`; ``None`` means ``FULL_SHARD``.
        cpu_offload: whether shards are stored on the CPU.
        auto_wrap_policy: which submodules become separate units.
        backward_prefetch: when backward prefetches the next unit; ``None`` means no prefetch.
        mixed_precision: the dtypes for mixed precision.
        ignored_modules: modules whose parameters are not sharded.
        param_init_fn: initializes modules on the meta device.
        device_id: the compute device.
        sync_module_states: whether rank 0 broadcasts its initial values.
        forward_prefetch: whether forward prefetches the next unit, in the order of the first iteration.
        limit_all_gathers: whether the CPU waits before it all-gathers a third unit while two are in flight.
        use_orig_params: whether the modules keep the original parameters instead of a flat parameter.
        ignored_states: parameters or modules to ignore.
        device_mesh: a mesh of the ranks to shard over, with one dimension, or with two for a hybrid strategy.
        fsdp_auto_wrap_policy: the deprecated name of ``auto_wrap_policy``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if arguments contradict each other.
        RuntimeError: if there is no process group.

    PyTorch's checkpoint functions recognize a sharded module by the second base class, whose code is not used.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroupType = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        fsdp_auto_wrap_policy: Any = None,
    ) -> None:
        require(arguments.MESH, "FullyShardedDataParallel", device_mesh=device_mesh)
        require(
            PREFETCH, "FullyShardedDataParallel", backward_prefetch=backward_prefetch
        )
        require(OFFLOAD, "FullyShardedDataParallel", cpu_offload=cpu_offload)
        require(
            arguments.PRECISION,
            "FullyShardedDataParallel",
            mixed_precision=mixed_precision,
        )
        policy = policy_by_either_name(auto_wrap_policy, fsdp_auto_wrap_policy)
        build.check_arguments(module, sharding_strategy, policy)
        super().__init__()
        ignored = build.find_ignored(
            module, ignored_modules, ignored_states, is_wrapper
        )
        self._ignored_modules, ignored_params = ignored
        self.compute_device = build.compute_device(module, device_id, ignored_params)
        ownership.check_one_api(module, "FullyShardedDataParallel")
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self._mesh, groups = build.choose_mesh(
            process_group,
            device_mesh,
            strategy,
            self.compute_device,
            has_policy=policy is not None,
        )
        # With a hybrid strategy, this is the shard group.
        self.process_group = groups[0] if isinstance(groups, tuple) else groups
        self.rank = self.process_group.rank()
        self.world_size = self.process_group.size()
        self._device_mesh = device_mesh
        self.sharding_strategy = build.strategy_on(self._mesh, strategy)  # type: ignore[assignment]
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.mixed_precision = mixed_precision or MixedPrecision()
        self._use_orig_params = use_orig_params
        if policy is not None:
            inner_options = {
                "process_group": groups if device_mesh is None else None,
                "device_mesh": device_mesh,
                # With ignored modules, pass modules, because an inner unit must ignore their buffers too.
                "ignored_modules": self._ignored_modules or None,
                "ignored_states": None if self._ignored_modules else ignored_params,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
            }
            # A policy wraps with this class, because a user's subclass may have other constructor arguments.
            auto_wrap(module, policy, FullyShardedDataParallel, inner_options, *ignored)
        self._shard(
            module,
            ignored_params,
            param_init_fn,
            has_device_id=device_id is not None,
            synchronizes=sync_module_states,
        )
        self._state_dict_state = options.StateDictState()
        state_dict_load.register_hooks(self)
        parts_of_units.register_hooks(self._unit)
        step_over_this_package()

    # --- copies ---

    def __copy__(self) -> Self:
        """Returns a shallow copy, which shares the wrapped module and the unit."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raises an error, because shards and hooks cannot be copied individually (NEW-22)."""
        raise RuntimeError(message("copy-of-wrapper"))

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]  # For `pickle` and `torch.save` (PROG-03).

    # --- the model's state ---

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The state in the chosen form, full by default (SD-FULL, SD-SHARD, SD-LOCAL). Every rank must call it.

        Takes the arguments of ``nn.Module.state_dict``. The form is set by `set_state_dict_type` or `state_dict_type`.
        The dict does not change when training continues. With ``keep_vars=True``, however, buffers and parameters that
        belong to no unit are the model's own tensors.
        """
        return state_dict.save(
            self,
            super().state_dict,
            *args,
            destination=destination,
            prefix=prefix,
            keep_vars=keep_vars,
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state in the chosen form (SD-FULL-08, SD-SHARD-03, SD-LOCAL-03). Every rank must call it.

        Args:
            state_dict: with plain names; in the full form, every rank needs the complete dict.
            strict: whether missing and unexpected keys are errors.
            assign: for tensors that belong to no unit, as in ``nn.Module``.

        Raises:
            RuntimeError: on all ranks, before any change, if the dict of any rank does not fit.
        """
        require(arguments.STATE, "load_state_dict", state_dict=state_dict)
        return state_dict_load.load(
            self, super().load_state_dict, state_dict, strict, assign
        )

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: options.StateDictConfig | None = None,
        optim_state_dict_config: options.OptimStateDictConfig | None = None,
    ) -> options.StateDictSettings:
        """Sets the form for all units in ``module``, equal on all ranks. Returns the previous form (SD-CFG-02 to 07).

        Raises:
            RuntimeError: if a configuration belongs to another type.
            AssertionError: if the units had different forms before.

        Deprecated, as in torch: use ``minifsdp.get_state_dict`` and ``minifsdp.set_state_dict``.
        """
        require(arguments.MODULE, "set_state_dict_type", module=module)
        warn(message("state-dict-type-deprecated"), FutureWarning)
        return options.set_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> options.StateDictSettings:
        """The form of all units in ``module`` (SD-CFG-09).

        Raises:
            AssertionError: if the units have different forms.
        """
        require(arguments.MODULE, "get_state_dict_type", module=module)
        return options.get_type(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: options.StateDictConfig | None = None,
        optim_state_dict_config: options.OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """Sets the form like `set_state_dict_type`, for the duration of a ``with`` block (SD-CFG-08)."""
        require(arguments.MODULE, "state_dict_type", module=module)
        warn(message("state-dict-type-deprecated"), FutureWarning)
        return options.type_in_block(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    # --- the optimizer's state ---

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Returns the optimizer's state by original names, in the model's chosen form. Every rank must call it.

        If the local form is chosen, the result has the sharded form.

        Args:
            model: a wrapper, or a module that contains wrappers.
            optim: an optimizer of the model's parameters.
            optim_state_dict: the dict to convert; ``None`` means ``optim.state_dict()``.
            group: with ``rank0_only``, its first rank gets the result; ``None`` means the model's shard group.

        Returns:
            ``"state"`` keyed by names and ``"param_groups"`` with names; empty with ``rank0_only`` on other ranks.

        Raises:
            RuntimeError: on all ranks, if the ranks' states do not match, or the optimizer has parameters that the
                model does not have. Also if a rank does not call this method.
        """
        require(arguments.MODULE, "optim_state_dict", model=model)
        require(OPTIMIZER, "optim_state_dict", optim=optim)
        require(
            arguments.WHOLE_OPTIMIZER_STATE,
            "optim_state_dict",
            optim_state_dict=optim_state_dict,
        )
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        source = NamedOptimizer(model, optim, options.form_for_optimizer(model))
        return optim_state.save(source, given, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Converts a result of `optim_state_dict` to a dict for ``optim.load_state_dict``. Every rank must call it.

        Args:
            model: a wrapper, or a module that contains wrappers.
            optim: an optimizer of the model's parameters.
            optim_state_dict: the state by original names, in the model's chosen form. With ``rank0_only``, only the
                first rank's dict is read.
            is_named_optimizer: whether ``optim`` keys its own state dict by names.
            load_directly: whether to call ``optim.load_state_dict`` as well.
            group: unused, because each unit stores its own groups.

        Raises:
            RuntimeError: on all ranks, before any change, if the dict does not fit, or if a rank does not call this.
            ValueError: on all ranks, if the dict does not fit, or if the model has no unit.
        """
        model, optim, optim_state_dict = optim_state_legacy.in_todays_order(
            model, optim, optim_state_dict
        )
        require(arguments.MODULE, "optim_state_dict_to_load", model=model)
        require(OPTIMIZER, "optim_state_dict_to_load", optim=optim)
        require(
            arguments.OPTIMIZER_STATE,
            "optim_state_dict_to_load",
            optim_state_dict=optim_state_dict,
        )
        form = options.form_for_optimizer(model)
        target = NamedOptimizer(model, optim, form, by_name=is_named_optimizer)
        loadable = optim_state.load(target, optim_state_dict)
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: optim_state_legacy.OptimInput | None = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Returns the full state by original names, on the first rank or on all ranks. Every rank must call it.

        Deprecated: use ``optim_state_dict``. ``optim_input`` is ignored.
        """
        return optim_state_legacy.save(
            "full_optim_state_dict",
            model,
            optim,
            Form(first_only=rank0_only),
            group,
            optim_input,
        )

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Returns the state by original names, each rank with its shards. Every rank must call it.

        Deprecated: use ``optim_state_dict``. Use the result with the sharded type of the model's state dict. Pass it
        to `flatten_sharded_optim_state_dict` before an optimizer loads it. Values are ``ShardedTensor``s also with a
        ``device_mesh``, unless the optimizer's configuration has ``_use_dtensor=True``.
        """
        require(arguments.MODULE, "sharded_optim_state_dict", model=model)
        config = options.get_type(model).optim_state_dict_config
        return optim_state_legacy.save(
            "sharded_optim_state_dict",
            model,
            optim,
            Form(
                StateDictType.SHARDED_STATE_DICT,
                use_dtensor=getattr(config, "_use_dtensor", False),
            ),
            group,
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: optim_state_legacy.OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Converts a full dict, which every rank must have, for this rank's optimizer. Nothing is communicated.

        Deprecated: use ``optim_state_dict_to_load``. Without ``optim`` and ``optim_input``, parameters are numbered as
        in ``model.parameters()``.

        Raises:
            ValueError: if both were given, or if the dict does not match. Ranks with a matching dict do not raise it.
        """
        return optim_state_legacy.load(
            "shard_full_optim_state_dict",
            full_optim_state_dict,
            model,
            optim_input,
            optim,
            Form(),
            communicates=False,
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: optim_state_legacy.OptimInput | None = None,
        optim: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Converts a full dict, which only the first rank has, for this rank's optimizer. Every rank must call it.

        Deprecated: use ``optim_state_dict_to_load`` with ``rank0_only=True``. ``group`` is ignored.

        Raises:
            ValueError: if ``optim`` and ``optim_input`` were both given, or, on all ranks, if the dict does not match.
        """
        return optim_state_legacy.load(
            "scatter_full_optim_state_dict",
            full_optim_state_dict,
            model,
            optim_input,
            optim,
            Form(first_only=True),
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Converts a sharded dict for this rank's optimizer. Every rank must call it.

        Deprecated: use ``optim_state_dict_to_load``.
        """
        return optim_state_legacy.load(
            "flatten_sharded_optim_state_dict",
            sharded_optim_state_dict,
            model,
            None,
            optim,
            Form(StateDictType.SHARDED_STATE_DICT),
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: optim_state_legacy.OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Changes the keys of a full dict to names or IDs, to use it with an unwrapped model. Nothing is communicated.

        Args:
            optim_state_dict: a full dict with either key type. It is returned unchanged if the keys already match.
            optim_state_key_type: the key type of the result.
            model: the model with the parameters. Pass the unwrapped model if the dict comes from it or is for it.
            optim_input: defines the numbering of the parameters if ``optim`` is not given.
            optim: an optimizer of the parameters of ``model``.

        Raises:
            AssertionError: if the key type is unknown.
            ValueError: if a key of the dict has no counterpart.
        """
        target = optim_state_legacy.target(
            "rekey_optim_state_dict", model, optim_input, optim, Form()
        )
        return optim_state_legacy.rekey(optim_state_dict, optim_state_key_type, target)
