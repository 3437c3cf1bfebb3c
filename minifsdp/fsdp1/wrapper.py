"""The wrapper module of ``FullyShardedDataParallel``: its unit, its forward, its root state, and its names.

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

``parameters()`` returns one flat parameter for each unit instead of the original parameters. Names contain the
wrappers' prefixes, as in torch. Inside ``summon_full_params``, they are the names of the unwrapped model. The weight of
``FSDP(Sequential(FSDP(Linear(2, 2))))`` is named ``_fsdp_wrapped_module.0._fsdp_wrapped_module.weight``, and inside
``summon_full_params`` it is named ``0.weight``. A wrapper also looks up attributes and items in the wrapped module:
``model.layer``, ``model[0]`` and ``model.vocab_size``.

Classes that are derived from `Wrapper` add methods: ``training.py`` and ``compat/wrapper_names.py``. The class
``FullyShardedDataParallel`` in ``fully_sharded_data_parallel.py`` joins them. It adds the constructor, which stores the
options and calls `Wrapper._shard`, and the methods for state dicts.

*In torch:* ``fully_sharded_data_parallel.py``, 2167 lines, 140 of them in the constructor and ``forward``. Instead of
the attributes above, a class ``_FSDPState`` has about thirty attributes, which free functions set.

Spec: CTOR, SHARD, HYB, FWD, NAMES-01 to NAMES-03, NAMES-06, NAMES-08, NAMES-09, PROG-100.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import nn

from minifsdp.cases import (
    buffer_dtypes,
    compiled_models,
    full_precision_evaluation,
    kept_views,
    replaced_parameters,
    second_places,
    sparse_gradients,
)
from minifsdp.cases.all_cases import CASES
from minifsdp.cases.containers import cast_floating, move
from minifsdp.cases.optimizer_steps import count_together, optimizer_steps
from minifsdp.checks import arguments, ownership
from minifsdp.checks.arguments import warn_renamed
from minifsdp.engine.events import events
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.flat_params import is_flattened
from minifsdp.engine.layout import owned_parameters
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message
from minifsdp.engine.precision import Precision
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Phase, Unit, UnitPolicy, modules_of_unit
from minifsdp.fsdp1 import build, initial
from minifsdp.fsdp1.forward_order import ForwardOrder
from minifsdp.fsdp1.full_params import leave_forward

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
    """A module whose parameters are sharded: the base class of `minifsdp.FullyShardedDataParallel`."""

    _root_state: RootState | None = None
    _comm_hook: Callable[..., Any] | None = None
    _comm_hook_state: object = None
    _is_inner = _is_outermost = _shows_clean_names = False
    # Whether the strategy reshards the unit after forward, unless this wrapper is the root.
    _reshards = False

    # --- construction ---

    def _shard(
        self,
        module: nn.Module,
        ignored_params: set[nn.Parameter],
        param_init_fn: Any,
        **options: bool,
    ) -> None:
        """Shards the parameters of ``module`` that no inner wrapper manages. The attributes have the user's options.

        `_initialize` has the same arguments.
        """
        self._forward_order: ForwardOrder | None = None
        self._full_precision_in_eval = full_precision_evaluation.is_on()
        self._buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        # Values in state dicts that use the memory of a buffer or an ignored parameter.
        self._shared_values: list[weakref.ref[torch.Tensor]] = []
        for wrapper in Wrapper.fsdp_modules(module):
            wrapper._is_inner = True
        self.add_module(WRAPPED, module)
        modules = self._own_modules()
        self._initialize(modules, ignored_params, param_init_fn, **options)
        self._unit = self._make_unit(module, modules)
        events.sharded([("", self), *modules_of_unit([module], is_wrapper)])

    def _initialize(
        self,
        modules: list[tuple[str, nn.Module]],
        ignored_params: set[nn.Parameter],
        param_init_fn: Any,
        *,
        has_device_id: bool,
        synchronizes: bool,
    ) -> None:
        """Materializes this unit's initial values, moves them to the device and, if requested, broadcasts them."""
        device = self.compute_device
        initial.materialize(modules, param_init_fn, device, ignored_params)
        ignored = self._ignored_params = initial.current(ignored_params)
        initial.move_modules(
            modules, device, ignored, has_device_id=has_device_id, sends=synchronizes
        )
        if synchronizes:
            unit_name = type(self.module).__name__
            initial.synchronize(modules, self._mesh, ignored, unit_name)

    def _own_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules whose own parameters and buffers this wrapper manages, with their paths."""
        return [
            (path, module)
            for path, module in modules_of_unit([self.module], is_wrapper)
            if module not in self._ignored_modules
        ]

    def _make_unit(
        self, module: nn.Module, modules: list[tuple[str, nn.Module]]
    ) -> build.FlatUnit | None:
        """Creates the unit of the parameters that no inner wrapper manages. Returns ``None`` if there are none."""
        parameters = owned_parameters(modules, self._ignored_params, is_flattened)
        second_places.find_second_places(modules, parameters)
        if not parameters:
            return None
        ownership.check_free(parameters)
        sparse_gradients.use_dense_gradients(parameters)
        precision = Precision(
            self.mixed_precision.param_dtype,
            self.mixed_precision.reduce_dtype,
            self.mixed_precision.keep_low_precision_grads,
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
            [module],
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
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """All wrappers in ``module``, including ``module`` itself; ``root_only`` skips inner wrappers (NAMES-06)."""
        arguments.require(arguments.MODULE, "fsdp_modules", module=module)
        return [
            one
            for one in module.modules()
            if isinstance(one, Wrapper) and not (root_only and one._is_inner)
        ]

    # --- names, attributes and items ---

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one (CTOR-10). Nothing is communicated."""
        return not self._is_inner

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All parameters that have a gradient. This is a deprecated name from torch 1.13 (NAMES-09)."""
        warn_renamed(
            "params_with_grad", "[p for p in model.parameters() if p.grad is not None]"
        )
        return [
            parameter for parameter in self.parameters() if parameter.grad is not None
        ]

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Same as ``nn.Module``, but without wrapper prefixes inside ``summon_full_params`` (NAMES-02)."""
        self._recover_after_error()
        found = super().named_parameters(*args, **kwargs)
        return (
            (self._shown(name), kept_views.kept_view(value)) for name, value in found
        )

    def named_buffers(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Same as ``nn.Module``, but without wrapper prefixes inside ``summon_full_params`` (NAMES-03)."""
        return (
            (self._shown(name), value)
            for name, value in super().named_buffers(*args, **kwargs)
        )

    def _shown(self, name: str) -> str:
        return name.replace(PREFIX, "") if self._shows_clean_names else name

    def __getattr__(self, name: str) -> Any:
        """Looks up an attribute in the wrapped module if the wrapper does not have it (NAMES-08)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Rejects a tensor or module under a name of the wrapped module, which would not use it."""
        is_new = (
            WRAPPED in self._modules
            and name not in self._modules
            and name not in self.__dict__
        )
        kinds = (torch.Tensor, nn.Module)
        # The forward may read a tensor or a module of this name. Other values can belong to the program.
        if (
            is_new
            and isinstance(value, kinds)
            and isinstance(getattr(self.module, name, None), kinds)
        ):
            raise AttributeError(
                message("set-on-wrapper", name=name, type=type(self.module).__name__)
            )
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        """Indexes the wrapped module (NAMES-08)."""
        return self.module[key]  # type: ignore[index]

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
            if self._full_precision_in_eval:
                full_precision_evaluation.restore_in_backward(
                    Wrapper.fsdp_modules(self), output, (args, kwargs)
                )
            if unit is not None:
                output = leave_forward(
                    unit, root_state.iteration, (args, kwargs), output
                )
            elif is_outermost_call:
                root_state.iteration.watch(output)
            if is_outermost_call:
                output = root_state.end_forward(output)
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
        ) and (self.module.training or not self._full_precision_in_eval)
        if unit is not None and unit.layout.is_summoned:
            # The full parameters have the stored dtype, and they may be on the CPU.
            first = unit.layout.param_infos[0]
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
        compiled_models.warn_if_compiled(self._use_orig_params)
        root_state = RootState(
            [
                (name, wrapper._unit)
                for name, wrapper in wrappers
                if wrapper._unit is not None
            ],
            self._unit,
            self.compute_device,
            cases=(
                count_together,
                replaced_parameters.ReplacedParameters,
                *CASES,
            ),
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
            buffer_dtypes.cast_buffers(wrapper)
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
