"""The wrapper module of ``FullyShardedDataParallel``: its construction, its forward and its root state.

::

    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.Adam(model.parameters())        # create it after wrapping, for the flat parameters
    model(batch).sum().backward()
    optimizer.step()

A wrapper replaces the module's parameters with this rank's shard of them, and restores the unsharded parameters during
forward and backward. Five lines of `forward` do this. Each of these lines calls the engine. A wrapper has three main
attributes:

* ``_unit``: the parameters that no inner wrapper manages; ``None`` if there are none
* ``_root_state``: the units that run together. The outermost running wrapper creates it at the first forward
* ``_is_inner``: whether another wrapper contains this one

Worked example: ``root(block0, block1)`` with all three wrapped. Each wrapper has a unit. The first ``root(batch)``
creates one root state of three units and stores it in all three wrappers. If ``block0(x)`` ran alone before, it has a
root state with one unit, which the new root state replaces. See ``engine/root.py``.

``parameters()`` returns one flat parameter for each unit instead of the original parameters. Classes that are derived
from `Wrapper` add methods: ``names.py``, ``training.py`` and ``compat/wrapper_names.py``. The class
``FullyShardedDataParallel`` in ``fully_sharded_data_parallel.py`` joins them and adds the methods for state dicts.

*In torch:* ``fully_sharded_data_parallel.py``, 2167 lines, 140 of them in the constructor and ``forward``. Instead of
the attributes above, a class ``_FSDPState`` has about thirty attributes, which free functions set.

Spec: CTOR, SHARD, HYB, FWD, NAMES-01, NAMES-06.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import nn

from minifsdp.cases import full_precision_evaluation
from minifsdp.cases.all_cases import CASES
from minifsdp.cases.buffer_dtypes import cast_buffers
from minifsdp.cases.compiled_models import warn_if_compiled
from minifsdp.cases.optimizer_steps import optimizer_steps
from minifsdp.cases.second_places import find_second_places
from minifsdp.cases.sparse_gradients import use_dense_gradients
from minifsdp.checks import ownership
from minifsdp.engine.events import events
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_params import is_flattened
from minifsdp.engine.layout import owned_parameters
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message
from minifsdp.engine.precision import Precision, cast_floating, move
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.root import RootState
from minifsdp.engine.schedule import BackwardPrefetch
from minifsdp.engine.unit import Phase, Unit, UnitPolicy, modules_of_unit
from minifsdp.fsdp1 import build, initial, wrap
from minifsdp.fsdp1.forward_order import ForwardOrder
from minifsdp.fsdp1.full_params import leave_forward
from minifsdp.fsdp1.ignored import find_ignored
from minifsdp.fsdp1.options import (
    CPUOffload,
    MixedPrecision,
    ProcessGroupType,
    ShardingStrategy,
)

WRAPPED = "_fsdp_wrapped_module"
PREFIX = WRAPPED + "."


def clean_name(name: str) -> str:
    """A parameter's or module's name without the wrappers' prefixes."""
    return name.replace(PREFIX, "").removesuffix(WRAPPED).removesuffix(".")


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` itself is a wrapper."""
    return isinstance(module, Wrapper)


def units_in(module: nn.Module) -> list[build.FlatUnit]:
    """The units of all wrappers in ``module``. A wrapper without parameters of its own has none."""
    return [
        wrapper._unit
        for wrapper in Wrapper.fsdp_modules(module)
        if wrapper._unit is not None
    ]


class Wrapper(nn.Module):
    """A module whose parameters are sharded: the base class of `minifsdp.FullyShardedDataParallel`.

    Every rank of the group must construct it, with modules of the same structure and in the same order.

    Args:
        module: the module to wrap.
        inner_class: the class that an auto-wrap policy wraps inner modules with.

    `minifsdp.FullyShardedDataParallel` documents the other arguments.
    """

    _root_state: RootState | None = None
    _comm_hook: Callable[..., Any] | None = None
    _comm_hook_state: object = None
    _is_inner = _is_outermost = _shows_clean_names = False
    # Whether the strategy reshards the unit after forward, unless this wrapper is the root.
    _reshards = False

    def __init__(
        self,
        module: nn.Module,
        inner_class: type[Wrapper],
        *,
        process_group: ProcessGroupType,
        sharding_strategy: ShardingStrategy | None,
        cpu_offload: CPUOffload | None,
        auto_wrap_policy: Any,
        backward_prefetch: BackwardPrefetch | None,
        mixed_precision: MixedPrecision | None,
        ignored_modules: Iterable[nn.Module] | None,
        param_init_fn: Callable[[nn.Module], None] | None,
        device_id: int | torch.device | None,
        sync_module_states: bool,
        forward_prefetch: bool,
        limit_all_gathers: bool,
        use_orig_params: bool,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
        device_mesh: Any,
    ) -> None:
        build.check_arguments(module, sharding_strategy, auto_wrap_policy)
        super().__init__()
        ignored = find_ignored(module, ignored_modules, ignored_states, is_wrapper)
        self._ignored_modules, self._ignored_params = ignored
        self.compute_device = build.compute_device(
            module, device_id, self._ignored_params
        )
        ownership.check_one_api(module, "FullyShardedDataParallel")
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        given = (
            process_group
            if device_mesh is None
            else build.groups_of_mesh(process_group, device_mesh, strategy)
        )
        has_policy = auto_wrap_policy is not None
        self._mesh, groups = build.choose_mesh(
            given, strategy, self.compute_device, has_policy=has_policy
        )
        # With a hybrid strategy, this is the shard group.
        self.process_group = groups[0] if isinstance(groups, tuple) else groups
        self.rank = self.process_group.rank()
        self.world_size = self.process_group.size()
        self._device_mesh = device_mesh
        self.sharding_strategy = build.strategy_on(self._mesh, strategy)
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self._forward_order: ForwardOrder | None = None
        self.limit_all_gathers = limit_all_gathers
        self.mixed_precision = mixed_precision or MixedPrecision()
        self._use_orig_params = use_orig_params
        self._full_precision_in_eval = full_precision_evaluation.is_on()
        self._buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        # Values in state dicts that use the memory of a buffer or an ignored parameter.
        self._shared_values: list[weakref.ref[torch.Tensor]] = []
        if has_policy:
            options = {
                "process_group": groups if device_mesh is None else None,
                "device_mesh": device_mesh,
                # With ignored modules, pass modules, because an inner unit must ignore their buffers too.
                "ignored_modules": self._ignored_modules or None,
                "ignored_states": None
                if self._ignored_modules
                else self._ignored_params,
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
            wrap.auto_wrap(module, auto_wrap_policy, inner_class, options, *ignored)
        for wrapper in Wrapper.fsdp_modules(module):
            wrapper._is_inner = True
        self.add_module(WRAPPED, module)
        modules = self._own_modules()
        self._initialize(
            modules,
            param_init_fn,
            moves=device_id is not None,
            synchronizes=sync_module_states,
        )
        self._unit = self._make_unit(module, modules)
        events.sharded([("", self), *modules_of_unit([module], is_wrapper)])

    def _own_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules whose own parameters and buffers this wrapper manages, with their paths."""
        inside = modules_of_unit([self.module], is_wrapper)
        return [
            (path, module)
            for path, module in inside
            if module not in self._ignored_modules
        ]

    def _initialize(
        self,
        modules: list[tuple[str, nn.Module]],
        param_init_fn: Any,
        *,
        moves: bool,
        synchronizes: bool,
    ) -> None:
        """Materializes this unit's initial values, moves them to the device and, if requested, broadcasts them."""
        device = self.compute_device
        initial.materialize(modules, param_init_fn, device, self._ignored_params)
        self._ignored_params = initial.current(self._ignored_params)
        if moves:
            initial.move_modules(modules, device, self._ignored_params)
        else:
            initial.shard_in_place(
                modules, device, self._ignored_params, sends=synchronizes
            )
        if synchronizes:
            initial.synchronize(
                modules, self._mesh, self._ignored_params, type(self.module).__name__
            )

    def _make_unit(
        self, module: nn.Module, modules: list[tuple[str, nn.Module]]
    ) -> build.FlatUnit | None:
        """Creates the unit of the parameters that no inner wrapper manages. Returns ``None`` if there are none."""
        parameters = owned_parameters(modules, self._ignored_params, is_flattened)
        find_second_places(modules, parameters)
        if not parameters:
            return None
        ownership.check_free(parameters)
        use_dense_gradients(parameters)
        chosen = self.mixed_precision
        precision = Precision(
            chosen.param_dtype, chosen.reduce_dtype, chosen.keep_low_precision_grads
        )
        is_sharded = self._mesh.shard is not None
        reshards = self.sharding_strategy in build.RESHARDS_AFTER_FORWARD
        layout = FlatLayout(
            module,
            parameters,
            self._mesh,
            self.compute_device,
            precision,
            offload=self.cpu_offload.offload_params,
            use_orig_params=self._use_orig_params,
            shows_kept=self._use_orig_params and is_sharded and not reshards,
        )
        ownership.take(parameters, is_flat=True)
        optimizer_steps.add(layout)
        plan = ReducePlan.mean(self._mesh, precision.reduces_in(layout.dtype))
        # A unit that is not sharded, and computes in a copy in another dtype, frees the copy.
        self._reshards = reshards if is_sharded else layout.is_copied
        return Unit(
            module,
            layout,
            [plan],
            UnitPolicy(reshard_after_forward=self._reshards),
        )

    # --- the wrapped module ---

    @property
    def module(self) -> nn.Module:
        """The wrapped module (NAMES-01)."""
        return self._modules[WRAPPED]  # type: ignore[return-value]

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Wrapper]:
        """All wrappers in ``module``, including ``module`` itself; ``root_only`` skips inner wrappers."""
        found = [m for m in module.modules() if isinstance(m, Wrapper)]
        return [m for m in found if not m._is_inner] if root_only else found

    # --- the algorithm ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module with its unsharded parameters. Every rank of the group must call it.

        Returns:
            The output of the wrapped module, with the same structure.
        """
        root_state = self._current_root_state()
        is_outermost_call = root_state.begin_forward(self._unit)
        unit = self._unit
        try:
            if is_outermost_call and self._shared_values:
                self._copy_shared_values()
            if is_outermost_call and self._full_precision_in_eval:
                full_precision_evaluation.choose_precision(Wrapper.fsdp_modules(self))
            args, kwargs = self._prepare_inputs(args, kwargs, is_outermost_call)
            if unit is not None and self._forward_order is not None:
                self._forward_order.enter(unit)
            if unit is not None:
                root_state.iteration.pre_forward(unit)
            output = self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]
            if unit is not None:
                output = leave_forward(
                    unit, root_state.iteration, (args, kwargs), output
                )
            elif is_outermost_call:
                root_state.iteration.watch(output)
        except BaseException as error:
            if is_outermost_call:
                root_state.fail_forward()
            if unit is not None and "function that returns multiple views" in str(
                error
            ):
                raise RuntimeError(
                    message("changed-in-flat", unit=unit.name)
                ) from error
            raise
        if is_outermost_call:
            output = root_state.end_forward(output)
            if self._full_precision_in_eval and not torch.is_grad_enabled():
                full_precision_evaluation.choose_precision(
                    Wrapper.fsdp_modules(self), for_backward=True
                )
        return output

    def _prepare_inputs(
        self, args: Any, kwargs: Any, is_outermost_call: bool
    ) -> tuple[Any, Any]:
        device = self.compute_device
        chosen = self.mixed_precision
        unit = self._unit
        dtype = chosen.param_dtype
        casts = (
            chosen.cast_root_forward_inputs
            if self._is_outermost
            else chosen.cast_forward_inputs
        )
        casts = casts and (self.module.training or not self._full_precision_in_eval)
        if unit is not None and unit.layout.is_summoned:
            # The full parameters have the stored dtype, and they may be on the CPU.
            first = unit.layout.parameters[0]
            full_param = getattr(first.module, first.name)
            casts = dtype is not None
            device = full_param.device
            dtype = full_param.dtype.to_real()
        if is_outermost_call and self.compute_device.type != "cpu":
            args, kwargs = move(device, (args, kwargs))
        if casts and dtype is not None:
            args, kwargs = cast_floating(dtype, (args, kwargs))
        return args, kwargs

    # --- values in state dicts (SAVE-01) ---

    def _share_until_forward(self, values: list[torch.Tensor]) -> None:
        """Records values of a state dict that use the model's memory. Inner wrappers use the same list."""
        for wrapper in Wrapper.fsdp_modules(self):
            if wrapper._shared_values is not self._shared_values:
                self._shared_values += wrapper._shared_values
                wrapper._shared_values = self._shared_values
        self._shared_values += map(weakref.ref, values)

    def _copy_shared_values(self) -> None:
        """Copies the recorded values that still exist, before a forward or ``load_state_dict()`` changes the model."""
        for reference in self._shared_values:
            if (value := reference()) is not None:
                value.data = value.clone()
        self._shared_values.clear()

    # --- the root state ---

    def _current_root_state(self) -> RootState:
        root_state = self._root_state
        return (
            self._create_root_state()
            if root_state is None or root_state.is_dissolved
            else root_state
        )

    def _recover_after_error(self) -> None:
        """Cleans up after a backward that raised an exception. Called before the user reads parameters or gradients."""
        if self._root_state is not None:
            self._root_state.recover_after_error()

    def _create_root_state(self) -> RootState:
        """Creates the root state of this wrapper, whose forward runs outside of any other wrapper (CTOR-10)."""
        wrappers = [
            (clean_name(name), m)
            for name, m in self.named_modules()
            if isinstance(m, Wrapper)
        ]
        # Wrappers that ran alone before have their own root state. Their units move to this root state (CTOR-11).
        for _, wrapper in wrappers:
            if wrapper._root_state is not None and not wrapper._root_state.is_dissolved:
                wrapper._root_state.dissolve()
        warn_if_compiled(self._use_orig_params)
        root_state = RootState(
            [
                (name, wrapper._unit)
                for name, wrapper in wrappers
                if wrapper._unit is not None
            ],
            self._unit,
            self.compute_device,
            cases=CASES,
            backward_prefetch=self.backward_prefetch,
            limit_all_gathers=self.limit_all_gathers,
        )
        order = ForwardOrder(root_state) if self.forward_prefetch else None
        for _, wrapper in wrappers:
            wrapper._forward_order = order
            wrapper._root_state = root_state
            wrapper._is_outermost = wrapper is self
            if wrapper._unit is not None:
                # The backward of the root runs right after its forward.
                is_kept = wrapper is self and self._mesh.shard is not None
                wrapper._unit.update_policy(
                    reshard_after_forward=wrapper._reshards and not is_kept,
                    prefetch_in_forward=None,
                )
            cast_buffers(wrapper)
        return root_state

    @outside_inference_mode
    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Dtype or device may have changed. The layout adapts to this, and the next forward creates a new root state.
        if self._root_state is not None and not self._root_state.is_dissolved:
            self._root_state.dissolve()
        if self._unit is not None and self._unit.phase is Phase.IDLE:
            self._unit.layout.refresh()
        return self

    def _only_on_the_root(self, what: str) -> None:
        if self._is_inner:
            raise RuntimeError(message("root-only", what=what))
