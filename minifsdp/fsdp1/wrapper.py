"""The wrapper module: ``FullyShardedDataParallel``.

::

    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.Adam(model.parameters())        # after wrapping: these are the flat parameters
    model(batch).sum().backward()
    optimizer.step()

A wrapper stands between a module and whoever calls it. It takes the module's parameters away, keeps a slice of them,
and gives the whole back for the time of a forward and a backward. All of that is in `forward`, five lines of it; what
each line does is the engine's.

Wrappers nest. Each has at most one unit, with the parameters that no wrapper inside has taken. The outermost one to
run forward is the root and makes the tree that all share; see ``engine/root.py``.

What a wrapper consists of is said in ``base.py``. All that is not needed for a training step, how it is looked through,
saved, summoned and clipped, is attached from outside, in ``fully_sharded_data_parallel.py``.

The original parameters are not in ``parameters()`` any more, one flat parameter for each unit is. Everything else about
the wrapped module can be reached through the wrapper as before: ``model.layer``, ``model[0]``, ``model.vocab_size``.

*In torch:* ``fully_sharded_data_parallel.py``, 2167 lines, of which the constructor and ``forward`` are 140.

Spec: CTOR, SHARD, HYB, FWD.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from minifsdp.engine import misuse
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import owned_parameters
from minifsdp.engine.precision import cast_floating, move
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.root import Root
from minifsdp.engine.unit import State, Unit, UnitPolicy
from minifsdp.fsdp1 import build, initial, wrap
from minifsdp.fsdp1.base import WRAPPED, WrapperBase, is_wrapper
from minifsdp.fsdp1.ignored import find_ignored
from minifsdp.fsdp1.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy


class Wrapper(WrapperBase):
    """A module whose parameters are sharded; the arguments are those of `minifsdp.FullyShardedDataParallel`.

    Every rank of the group must construct it, with modules of the same structure and in the same order.

    Attributes:
        _inner_class: what an auto-wrap policy wraps with.
    """

    _inner_class: type[Wrapper]

    def __init__(
        self,
        module: nn.Module,
        process_group: build.ProcessGroups | None = None,
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
    ) -> None:
        build.check_options(
            module, sharding_strategy, cpu_offload, auto_wrap_policy, backward_prefetch, mixed_precision
        )
        misuse.check_one_door(module, "FullyShardedDataParallel")
        super().__init__()
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        process_group = build.groups_of(device_mesh, process_group, strategy)
        self.device_mesh = device_mesh
        ignored = find_ignored(module, ignored_modules, ignored_states, is_wrapper)
        self._ignored_modules, self._ignored_parameters = ignored
        self.compute_device = build.compute_device(module, device_id, ignored[1])
        self.mesh, groups = build.choose_mesh(
            process_group, strategy, has_policy=auto_wrap_policy is not None, device=self.compute_device
        )
        # Of a hybrid strategy's two groups the one that shards.
        self.process_group = groups[0] if isinstance(groups, tuple) else groups
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.sharding_strategy = build.strategy_on(self.mesh, strategy)
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._use_orig_params = use_orig_params
        self._precision = build.precision_of(mixed_precision)
        self._tree: Root | None = None
        # An old switch of torch that programs still set in their environment.
        self._full_precision_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self._buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self._is_inner = self._is_tree_root = False
        self._shows_clean_names = False
        if auto_wrap_policy is not None:
            inner_arguments = {
                "process_group": groups if device_mesh is None else None,
                "device_mesh": device_mesh,
                "sharding_strategy": strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                # Modules, where modules were given: an inner unit must leave their buffers alone, too.
                **({"ignored_modules": [*ignored[0]]} if ignored[0] else {"ignored_states": ignored[1]}),
            }
            wrap.auto_wrap(module, auto_wrap_policy, self._inner_class, inner_arguments, *ignored)
        for inner in WrapperBase.fsdp_modules(module):
            inner._is_inner = True
        self.add_module(WRAPPED, module)
        modules = build.modules_of_unit(module, is_wrapper, self._ignored_modules)
        self._initialize(modules, param_init_fn, device_id, sync_module_states)
        self._unit = self._make_unit(module, modules)

    def _initialize(
        self, modules: list[tuple[str, nn.Module]], param_init_fn: Any, device_id: Any, sync_module_states: bool
    ) -> None:
        """Makes this unit's initial values real, in the right place, and if so wished equal on all ranks."""
        ignored = {*self._ignored_parameters, *build.flattened_in(modules)}
        initial.materialize(modules, param_init_fn, self.compute_device, ignored)
        if device_id is not None:
            initial.move_modules(modules, self.compute_device, ignored)
        else:
            initial.cut_in_place(modules, self.compute_device, ignored, sends=sync_module_states)
        if sync_module_states:
            initial.synchronize(modules, self.mesh, ignored, type(self.module).__name__)

    def _make_unit(self, module: nn.Module, modules: list[tuple[str, nn.Module]]) -> build.FlatUnit | None:
        """The unit of what no inner wrapper has taken; ``None`` if nothing is left."""
        parameters = owned_parameters(modules, self._ignored_parameters)
        if not parameters:
            return None
        precision = self._precision
        layout = FlatLayout(
            module,
            parameters,
            self.mesh,
            self.compute_device,
            compute_dtype=precision.compute,
            keep_reduce_dtype=precision.keep_reduce_dtype,
            offload=self.cpu_offload.offload_params,
            keep_originals=self._use_orig_params,
        )
        plan = ReducePlan.mean(self.mesh, precision.reduce or layout.dtype)
        frees = self.sharding_strategy in build.FREES_AFTER_FORWARD and self.mesh.shard is not None
        return Unit(module, layout, plan, precision, UnitPolicy(reshard_after_forward=frees))

    # --- the algorithm ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module with its full parameters. Every rank of the group must call it.

        Returns:
            What the wrapped module returns, of the same structure.
        """
        tree = self._current_tree()
        is_outermost_call = tree.begin_forward(self._unit)
        try:
            unit = self._unit
            if self._full_precision_in_eval and unit is not None and unit.state is State.SHARDED:
                unit.layout.use_stored_dtype(not self.training)
            args, kwargs = self._prepare_inputs(args, kwargs, is_outermost_call)
            if unit is not None:
                tree.cycle.pre_forward(unit)
            output = self._modules[WRAPPED](*args, **kwargs)  # type: ignore[misc]
            if unit is not None:
                tree.cycle.post_forward(unit, (args, kwargs), output)
            elif is_outermost_call:
                tree.cycle.watch(output)
        except BaseException:
            if is_outermost_call:
                tree.fail_forward()
            raise
        if is_outermost_call:
            tree.end_forward()
        return output

    def _prepare_inputs(self, args: Any, kwargs: Any, is_outermost_call: bool) -> tuple[Any, Any]:
        if is_outermost_call and self.compute_device.type != "cpu":
            args, kwargs = move(self.compute_device, (args, kwargs))
        precision = self._precision
        if precision.compute is not None and (self.training or not self._full_precision_in_eval):
            casts = precision.cast_root_inputs if self._is_tree_root else precision.cast_inputs
            if casts:
                args, kwargs = cast_floating(precision.compute, (args, kwargs))
        return args, kwargs
